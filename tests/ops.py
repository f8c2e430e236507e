"""The table of operations. Every transformation's tests run over its rows.

The rows are those of the modules in `families`, which are found by themselves: a new family is a
new module there.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
from rows import DTYPES, STORED, Op

from jax_batched._ffi import cuda_tiers, force_kernel, target_name
from jax_batched._matrices import adjoint

WIDE_DTYPES = ("float64", "complex128")

_ON_CPU = jax.default_backend() == "cpu"

# Kernels that can be forced on this platform; "" is the one that the library picks.
KERNELS = ("", "reference") if _ON_CPU else ("", *sorted({tier.kernel for tier in cuda_tiers()}))
# Ways without a kernel of its own that can be forced like one, at a few sizes: they do not change
# with n, and are slow to compile.
PATHS = ("composed", "lax")
PATH_SIZES = (1, 3, 9)

FAMILIES = [
    importlib.import_module(f"families.{module.name}")
    for module in pkgutil.iter_modules(families.__path__)
]
ROWS: list[Op] = [op for family in FAMILIES for op in family.ROWS]
BY_NAME = {op.name: op for op in ROWS}
# Functions by name: public ones of a square matrix, and of a matrix and right-hand sides; programs
# of what has no row, which take inv's operands.
SQUARE, SOLVERS, PROGRAMS = (
    {name: f for family in FAMILIES for name, f in getattr(family, kind, {}).items()}
    for kind in ("SQUARE", "SOLVERS", "PROGRAMS")
)

TABLE = [op for op in ROWS if not op.composite]
# Made of the others, hence slow to compile, and different only in what is inside the primitives.
COMPOSITE = [op for op in ROWS if op.composite]
ONE_COMPOSITE = [op for op in COMPOSITE if op.usual]
# For transformations that are slow to compile: every operation, every flag on and off.
REDUCED = [op for op in TABLE if op.reduced]
# One row of each kernel, its two directions in turn.
ONE_EACH = [op for op in TABLE if op.usual]
CAN_FAIL = [op for op in TABLE if op.can_fail]
SOLVING = [op for op in (*REDUCED, COMPOSITE[0], COMPOSITE[-1]) if op.takes_b]
WITH_KERNELS = [op for op in REDUCED if op.kernels]
SUBSTITUTING = [op for op in WITH_KERNELS if op.takes_b]


def of(operation: str) -> list[Op]:
    """The rows of one operation."""
    return [op for op in ROWS if op.operation == operation]


def compute_capability() -> int:
    """That of the default GPU: 90 for sm_90."""
    major, minor = jax.devices()[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def serves(op: Op, kernel: str, dtype: Any, n: int, nrhs: int = 1) -> bool:
    """Whether a kernel or path can be forced for this call on the present platform.

    The ranges are the rows' own, not the library's; which CUDA kernels exist is what their table
    says.
    """
    if kernel == "":
        return True
    if not op.kernels or n > op.max_n:
        return False
    if kernel in PATHS:
        return kernel in op.paths and n in PATH_SIZES
    if _ON_CPU:
        return True
    nrhs = nrhs if op.takes_b else 1
    if nrhs > op.max_nrhs.get(kernel, nrhs):
        return False
    name = np.dtype(dtype).name
    called = op.kernels_called(name, n, nrhs)
    if name in STORED:  # beyond their range they are cast to float32 and back
        if n <= op.stored_max_n and nrhs == 1:
            name = "float16"
        else:
            name, called = "float32", op.kernels_called("float32", n, nrhs)
    return called <= {
        tier.operation
        for tier in cuda_tiers()
        if (tier.kernel, tier.dtype) == (kernel, name)
        and tier.min_n <= n <= tier.max_n
        and tier.capability <= compute_capability()
        and not tier.fast
    }


def by_kernel(
    rows: Sequence[Op],
    sizes: Sequence[int] = range(1, 65),
    dtypes: Sequence[str] = DTYPES,
    paths: Sequence[str] = (),
) -> list[tuple[Op, str, str]]:
    """Each row with each kernel (and path) and dtype that can be forced for some of the sizes."""
    return [
        (op, kernel, dtype)
        for op in rows
        for kernel in (*KERNELS, *paths)
        for dtype in dtypes
        if any(serves(op, kernel, dtype, n) for n in sizes)
    ]


def by_path(rows: Sequence[Op], paths: Sequence[str] = PATHS) -> list[tuple[Op, str]]:
    """Each row as the library runs it, and with each path that can be forced."""
    return [(op, path) for op in rows for path in ("", *paths) if serves(op, path, "float64", 1)]


def gradient(op: Op) -> Callable[..., Any]:
    """The gradient of a real function that is curved in all of an operation's result."""

    def f(*operands: Any) -> Any:
        x = op(*operands)
        return jnp.sum(jnp.real(x) ** 2 + jnp.sin(jnp.imag(x)))

    return jax.grad(f)


def compiled(f: Callable[..., Any], *args: Any, kernel: str = "") -> Any:
    """f(*args) as one compiled program, with the named kernel."""
    with force_kernel(kernel):
        return jax.jit(lambda *x: f(*x))(*args)


def on_each(op: Callable[..., Any], calls: Sequence[Any], kernel: str = "") -> list[Any]:
    """The result of op for each of several tuples of operands, in one compiled program."""
    results = compiled(lambda xs: [op(*x) for x in xs], list(calls), kernel=kernel)
    return [jax.tree.map(np.asarray, result) for result in results]


def serves_shape(operations: Sequence[str], kernel: str, dtype: str, m: int, n: int) -> bool:
    """Whether a kernel can be forced for operations on matrices that need not be square."""
    if jax.default_backend() == "cpu" or kernel in ("", "lax"):
        return True
    if kernel == "thread" and m != n:
        return False
    tiers = [tier for tier in cuda_tiers() if (tier.kernel, tier.dtype) == (kernel, dtype)]
    return all(
        any(tier.operation == op and tier.min_n <= max(m, n) <= tier.max_n for tier in tiers)
        for op in operations
    )


def check_same_bits(
    f: Callable[..., Any], arrays: Sequence[Any], kernels: Sequence[str] = ("lanes", "blocked", "")
) -> None:
    """Asserts that f of each array has the same bits with all these kernels."""
    first, *others = (on_each(f, [(a,) for a in arrays], kernel) for kernel in kernels)
    for other in others:
        for a, *results in zip(arrays, first, other, strict=True):
            for x, y in zip(*map(jax.tree.leaves, results), strict=True):
                assert same_bits(x, y), a.shape


def by_reference_kernel(op: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
    """`on_each` with the plain CPU kernel, on whatever machine."""
    with jax.default_device(jax.devices("cpu")[0]):
        return on_each(op, calls, "reference")


def times(a: np.ndarray, scale: Any) -> np.ndarray:
    """a * scale with a real scale; a NaN imaginary part does not spoil the real one."""
    if not np.iscomplexobj(a):
        return a * scale
    product = np.empty_like(a)
    product.real, product.imag = a.real * scale, a.imag * scale
    return product


def next_to_overflow(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Positive definite matrices that are not Hermitian, of the dtype: the sums of an entry's and
    its mirror image's real parts, imaginary parts or both overflow."""
    n = shape[-1]
    form = jnp.finfo(dtype)
    phase = rng.choice([1, -1], (*shape[:-2], n, 1))
    if np.dtype(dtype).kind == "c":
        phase = np.exp(np.pi / 4j * rng.integers(0, 8, phase.shape))
    skew = np.tril(rng.uniform(-0.05, 0.05, shape), -1)
    a = (0.92 * phase @ adjoint(phase) + 0.07 * np.eye(n)) * (1 + skew - np.swapaxes(skew, -1, -2))
    quarter = (a * (float(form.max) / 4)).astype(dtype)
    return quarter * np.array(4, quarter.real.dtype)


def factorizations(text: str) -> int:
    """How many factorizations a program's text calls."""
    return sum(text.count(target_name(op)) for op in ("cholesky", "solve_pos"))


def ids(op: Any) -> str | None:
    """Name of a row, or of a kernel, in a test's id."""
    if isinstance(op, Op):
        return op.name
    return "default" if op == "" else None


def same_bits(x: Any, y: Any) -> bool:
    """Whether two arrays are equal bit for bit, apart from the payloads of NaNs."""
    x, y = np.asarray(x), np.asarray(y)
    return x.shape == y.shape and x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True)
