"""The file that measurements go into."""

from pathlib import Path

from jax_batched._tuned import Block, Kind, Table, read_table, write_table


def merge(table: Table, kind: Kind, block: Block) -> None:
    """Puts new measurements into a table; sizes that were not measured again stay."""
    before = table.get(kind, block).kernels
    limits = {**before, **block.kernels}
    kernels = {limit: {**before.get(limit, {}), **block.kernels.get(limit, {})} for limit in limits}
    table[kind] = Block(block.note, kernels)


def write(file: Path, found: Table) -> None:
    """Puts new measurements into a file, which need not be there."""
    table = read_table(file.read_text(), str(file)) if file.exists() else {}
    for kind, block in found.items():
        merge(table, kind, block)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(write_table(table))
