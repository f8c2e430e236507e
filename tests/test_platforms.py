"""Where there are no kernels of ours, every operation lowers without a call of ours.

On other platforms, and here where a path without kernels is forced.
"""

import itertools

import jax
import ops
import pytest

OTHERS = ("tpu", "rocm")
ROWS = [*ops.REDUCED, *ops.COMPOSITE]


def lowered(f, shapes, platforms):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=platforms).as_text()


def everything(op):
    """A function of the result, its derivatives in both modes, info, and a shared operand."""

    def f(*operands):
        results = [op(*operands), ops.gradient(op)(*operands)]
        results.append(jax.jvp(op, operands, operands)[1])
        results.append(jax.vmap(op)(*operands))
        if op.has_info:
            results.append(op.with_info(*operands)[1])
        if op.takes_b:
            a, b = operands
            results.append(jax.vmap(op, (None, 0))(a[0], b))
        return results

    return f


def shapes_of(op, dtype):
    operands = op.operands("float32", batch=(3,), n=5, nrhs=2)
    return [jax.ShapeDtypeStruct(x.shape, dtype) for x in operands]


@pytest.mark.parametrize("platform", OTHERS)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *itertools.product(ROWS, ops.DTYPES),
        *itertools.product(ops.REDUCED, ops.STORED),
    ],
    ids=ops.ids,
)
def test_lowers_without_calls_of_ours(op, platform, dtype):
    text = lowered(everything(op), shapes_of(op, dtype), (platform,))
    assert "func.func public @main" in text
    assert "jax_batched." not in text


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_the_forced_lax_path_calls_nothing_of_ours(op):
    shapes = shapes_of(op, "float32")
    with ops.force_kernel("lax"):
        assert "jax_batched." not in lowered(everything(op), shapes, ("cpu",))
    assert "jax_batched." in lowered(everything(op), shapes, ("cpu",))


@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_a_program_for_all_platforms_calls_ours_where_there_are_kernels(op):
    text = lowered(op, shapes_of(op, "float32"), ("cpu", "cuda", *OTHERS))
    assert "jax_batched." in text
    target = f"jax_batched.{op.operation}.v1"
    assert text.count(f"@{target}(") == (op.kernels + (op.kernels and op.on_cuda))
