"""Which path each operation takes on this installation, and why."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import jax

from jax_batched import _ffi


class BackendInfo(NamedTuple):
    """Path of one operation on one platform.

    Attributes:
      operation: name of the operation.
      platform: "cpu", "cuda" or "other" (TPU, ROCm, ...).
      path: "kernel" or "lax".
      max_n: largest matrix the kernels serve; beyond it the path is "lax" or, of a batch, blocks
        (docs/performance.md). 0 if there are none.
      reason: why.
    """

    operation: str
    platform: str
    path: str
    max_n: int
    reason: str


def backend_info() -> list[BackendInfo]:
    """Which path each operation takes on each platform of this installation, and why."""
    rows = []
    for operation in _ffi.OPERATIONS:
        for platform in _ffi.PLATFORMS:
            status = _ffi.native_module_status(platform)
            module = _ffi.native_module(platform)
            if module is None:
                rows.append(BackendInfo(operation, platform, "lax", 0, status))
                continue
            if platform == "cpu":
                status = f"instruction set {module.isa()}"
            limit = _ffi.max_n(platform, operation, "float32")
            if limit == 0:
                rows.append(BackendInfo(operation, platform, "lax", 0, "no kernels for it yet"))
                continue
            rows.append(BackendInfo(operation, platform, "kernel", limit, status))
        rows.append(BackendInfo(operation, "other", "lax", 0, "no kernels for this platform"))
    return rows


def versions() -> str:
    """Versions and devices, in two lines."""
    devices = ", ".join(f"{d.platform} {d.device_kind}" for d in jax.devices())
    return f"jax_batched {version('jax_batched')}, jax {jax.__version__}\ndevices: {devices}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
