"""Which of the compiled CUDA kernels is fastest, as measured: data that is read at import.

The package's own file is ``data/tuned.json``. A user's file comes before it: the one that the
environment variable ``JAX_BATCHED_TUNED`` names, else ``jax_batched/tuned.json`` in the user's
folder of configurations (``$XDG_CONFIG_HOME`` or ``~/.config``) if it is there. What it says of a
kind of call replaces what the package says; an empty ``JAX_BATCHED_TUNED`` stands for no such file.
``python -m jax_batched.tune --write`` writes one.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE_FILE = Path(__file__).parent / "data" / "tuned.json"
VARIABLE = "JAX_BATCHED_TUNED"


class Kind(NamedTuple):
    """The calls that are measured together: a block of the table."""

    capability: int
    operation: str
    fast: bool
    dtype: str

    def __str__(self) -> str:
        fast = ' accuracy="fast"' if self.fast else ""
        return f"sm_{self.capability} {self.operation} {self.dtype}{fast}"


class Block(NamedTuple):
    """The kernels that serve one kind of call.

    Attributes:
      note: what it was measured on.
      kernels: for each largest number of right-hand sides (None: any), the kernel of each n.
    """

    note: str
    kernels: Mapping[int | None, Mapping[int, str]]


Table = dict[Kind, Block]
Row = tuple[int, str, bool, str, int | None, int, int, str]


def user_file() -> Path | None:
    """Where a user's file is or would be; None if the user declines one."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "jax_batched" / "tuned.json"


def _field(row: Any, name: str, expected: type | tuple[type, ...]) -> Any:
    value = row.get(name)
    if name not in row or not isinstance(value, expected) or isinstance(value, bool):
        raise ValueError(f"{name!r} is missing or of another type")
    return value


def read_table(text: str, name: str) -> Table:
    """The table in a file's text; `name` is the file's, for errors."""
    table: Table = {}
    place = "no 'tables'"
    try:
        for number, entry in enumerate(json.loads(text)["tables"]):
            place = f"table {number}"
            accuracy = _field(entry, "accuracy", str)
            if accuracy not in ("ieee", "fast"):
                raise ValueError(f"accuracy is {accuracy!r}, not 'ieee' or 'fast'")
            kind = Kind(
                _field(entry, "capability", int),
                _field(entry, "operation", str),
                accuracy == "fast",
                _field(entry, "dtype", str),
            )
            place = f"table {number} ({kind})"
            if kind in table:
                raise ValueError("there is another one of this kind")
            kernels: dict[int | None, dict[int, str]] = {}
            table[kind] = Block(_field(entry, "measured", str), kernels)
            for line, row in enumerate(_field(entry, "rows", list)):
                place = f"table {number} ({kind}), row {line}"
                nrhs = _field(row, "max_nrhs", (int, type(None)))
                low, high = _field(row, "min_n", int), _field(row, "max_n", int)
                if not (1 <= low <= high and (nrhs is None or nrhs >= 1)):
                    raise ValueError("sizes that are no range")
                sizes = dict.fromkeys(range(low, high + 1), _field(row, "kernel", str))
                kernels.setdefault(nrhs, {}).update(sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {place}: {error}") from error
    return table


def ranges(kernels: Mapping[int, str]) -> Iterator[tuple[int, int, str]]:
    """(smallest n, largest n, kernel) of each run of neighbouring sizes with one kernel."""
    run: tuple[int, int, str] | None = None
    for n, kernel in sorted(kernels.items()):
        if run is not None and (n, kernel) == (run[1] + 1, run[2]):
            run = (run[0], n, kernel)
            continue
        if run is not None:
            yield run
        run = (n, n, kernel)
    if run is not None:
        yield run


def rows(table: Table) -> Iterator[Row]:
    """The rows of a table as the native modules take them."""
    for kind, block in sorted(table.items()):
        for nrhs in sorted(block.kernels, key=lambda k: (k is None, k)):
            for low, high, kernel in ranges(block.kernels[nrhs]):
                yield (*kind, nrhs, low, high, kernel)


def write_table(table: Table) -> str:
    """A file's text: a line for each row."""
    tables = []
    for kind, block in sorted(table.items()):
        head = {
            "capability": kind.capability,
            "operation": kind.operation,
            "accuracy": "fast" if kind.fast else "ieee",
            "dtype": kind.dtype,
            "measured": block.note,
        }
        lines = [
            json.dumps({"max_nrhs": nrhs, "min_n": low, "max_n": high, "kernel": kernel})
            for *_, nrhs, low, high, kernel in rows({kind: block})
        ]
        body = ",\n    ".join(lines)
        tables.append(f'  {json.dumps(head)[:-1]}, "rows": [\n    {body}\n  ]}}')
    return '{"tables": [\n' + ",\n".join(tables) + "\n]}\n"


def check(table: Table, name: str, serves: Callable[[Kind, int, str], int]) -> None:
    """Raises unless each kernel serves its sizes.

    Args:
      table: the table.
      name: of its file, for errors.
      serves: the largest n up to which the named kernel serves from an n on, 0 if it does not.
    """
    for row in rows(table):
        kind, low, high, kernel = Kind(*row[:4]), *row[5:]
        while low <= high:
            served = serves(kind, low, kernel)
            if served == 0:
                raise ValueError(f"{name}: {kind}: no kernel {kernel!r} serves n = {low}")
            low = served + 1


def load(serves: Callable[[Kind, int, str], int]) -> Table:
    """The table in use: the package's, and what a user's file puts in its place."""
    table = read_table(PACKAGE_FILE.read_text(), str(PACKAGE_FILE))
    file = user_file()
    if file is None or not (file.exists() or VARIABLE in os.environ):
        return table
    try:
        text = file.read_text()
    except OSError as error:
        raise ValueError(f"{VARIABLE}={file}: {error.strerror}") from error
    user = read_table(text, str(file))
    check(user, str(file), serves)
    return table | user
