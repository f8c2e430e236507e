"""What the examples share: exact products, times of calls, a table of names and values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

# Stock JAX calls OpenBLAS for one matrix at a time, whose threads would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# float32 products stay float32 products on every accelerator
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def median_time(f: Callable[..., Any], *operands: Any, repeats: int = 7) -> float:
    """The median seconds of a call, after one call that compiles."""
    jax.block_until_ready(f(*operands))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*operands))
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[repeats // 2]


def timed(f: Callable[..., Any], *operands: Any) -> tuple[Any, float]:
    """The result of a compiled program and its seconds."""
    begin = time.perf_counter()
    result = jax.block_until_ready(f(*operands))
    return result, time.perf_counter() - begin


def print_table(title: str, rows: Mapping[str, str]) -> None:
    """Prints names and values below a title."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
