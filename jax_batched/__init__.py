"""Batched small dense linear algebra for JAX at the speed of memory."""

from importlib.metadata import version as _version

from jax_batched import _ffi

_ffi.register_targets()

from jax_batched import blas  # noqa: E402
from jax_batched._info import BackendInfo, backend_info  # noqa: E402
from jax_batched.cho_solve import cho_factor, cho_solve  # noqa: E402
from jax_batched.cholesky import cholesky  # noqa: E402
from jax_batched.eigh import EighResult, eigh, eigh_function, eigvalsh  # noqa: E402
from jax_batched.export import export_disabled_checks  # noqa: E402
from jax_batched.inv import SlogdetResult, det, inv, slogdet  # noqa: E402
from jax_batched.lstsq import LstsqResult, lstsq  # noqa: E402
from jax_batched.lu import lu, lu_factor, lu_solve  # noqa: E402
from jax_batched.memory import keep_freed_memory  # noqa: E402
from jax_batched.override import LinalgOverride, override_jax_linalg  # noqa: E402
from jax_batched.pinv import PolarResult, matrix_rank, pinv, polar  # noqa: E402
from jax_batched.qr import QRResult, householder_product, qr, qr_multiply  # noqa: E402
from jax_batched.ragged import RaggedBatch  # noqa: E402
from jax_batched.refined_solve import RefinementInfo, refined_solve  # noqa: E402
from jax_batched.solve import solve  # noqa: E402
from jax_batched.svd import SVDResult, svd  # noqa: E402
from jax_batched.triangular_solve import solve_triangular, triangular_solve  # noqa: E402

__version__ = _version("jax_batched")

__all__ = [
    "BackendInfo",
    "EighResult",
    "LinalgOverride",
    "LstsqResult",
    "PolarResult",
    "QRResult",
    "RaggedBatch",
    "RefinementInfo",
    "SVDResult",
    "SlogdetResult",
    "__version__",
    "backend_info",
    "blas",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "det",
    "eigh",
    "eigh_function",
    "eigvalsh",
    "export_disabled_checks",
    "householder_product",
    "inv",
    "keep_freed_memory",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_rank",
    "override_jax_linalg",
    "pinv",
    "polar",
    "qr",
    "qr_multiply",
    "refined_solve",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    "triangular_solve",
]
