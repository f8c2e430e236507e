"""What the examples share: a time of a call, and a table of names and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


def median_time(f: Callable[..., Any], *operands: Any, repeats: int = 7) -> float:
    """The median seconds of a call, after one call that compiles."""
    jax.block_until_ready(f(*operands))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*operands))
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[repeats // 2]


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Prints names and values below a title."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
