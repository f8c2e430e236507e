"""vmap over any axes, nested, and the broadcasting of batch dimensions."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _matrices as matrices

SOLVE_POS = ops.of("solve_pos")

BATCH = (3, 4)


@pytest.mark.parametrize("axis", (0, 1, 2, -1, -2))
@pytest.mark.parametrize(("op", "path"), ops.by_path(ops.WITH_KERNELS), ids=ops.ids)
def test_any_axis_in_and_out(op, path, axis):
    operands = op.operands("float64", batch=(4,), n=3, nrhs=2)
    mapped = [np.moveaxis(x, 0, axis) for x in operands]
    with ops.force_kernel(path):
        x = jax.vmap(op, in_axes=axis, out_axes=axis)(*mapped)
    op.check(operands, np.moveaxis(np.asarray(x), axis, 0))


@pytest.mark.parametrize(("op", "path"), ops.by_path(ops.SOLVING), ids=ops.ids)
def test_two_levels_of_every_combination_of_mapped_operands(op, path):
    choices = [(0, 0), (0, None), (None, 0)]
    levels = list(itertools.product(choices, choices))
    rng = np.random.default_rng(0)
    cases, full = [], []
    for pair in levels:
        shapes, wholes = [], []
        for i in (0, 1):
            mapped = [axes[i] is not None for axes in pair]
            shapes.append(tuple(size for size, has in zip(BATCH, mapped, strict=True) if has))
            wholes.append(tuple(slice(None) if has else None for has in mapped))
        a = op.spoil(op.make(rng, "float64", (*shapes[0], 3, 3)))
        b = op.right_hand_side(rng, "float64", shapes[1], 3, 2)
        cases.append((a, b))
        full.append(
            [
                np.broadcast_to(x[index], (*BATCH, *x.shape[-2:]))
                for x, index in zip((a, b), wholes, strict=True)
            ]
        )

    def every_pair(cases):
        return [
            jax.vmap(jax.vmap(op, inner), outer)(*case)
            for (outer, inner), case in zip(levels, cases, strict=True)
        ]

    for operands, x in zip(full, ops.compiled(every_pair, cases, kernel=path), strict=True):
        op.check(operands, x)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.of("cholesky") + SOLVE_POS, ids=ops.ids)
def test_three_levels_are_one_batch_bit_for_bit(op, dtype):
    operands = op.operands(dtype, batch=(2, 3, 4), n=5, nrhs=2)
    x, info = jax.vmap(jax.vmap(jax.vmap(op.with_info)), 1, 1)(*operands)
    assert info.shape == (2, 3, 4)
    assert ops.same_bits(x, op(*operands))


def test_vector_right_hand_side_in_crossed_nested_vmap():
    a, _ = SOLVE_POS[0].operands("float64", batch=(4,), n=3)
    b = np.random.default_rng(1).standard_normal((5, 3))
    solve = functools.partial(jb.solve, assume_a="pos")
    x = jax.vmap(jax.vmap(solve, (0, None)), (None, 0))(a, b)
    assert x.shape == (5, 4, 3)
    m = SOLVE_POS[0].matrix(a)
    expected = [[np.linalg.solve(m[i], b[j]) for i in range(4)] for j in range(5)]
    np.testing.assert_allclose(x, expected, rtol=1e-13)


def largest_array(f, *args):
    """Elements of the largest array in the compiled program of f."""
    text = jax.jit(f).lower(*args).compile().as_text()
    shapes = re.findall(r"\b(?:f|c|s|u|pred)\d*\[([\d,]*)\]", text)
    return max(math.prod(int(d) for d in shape.split(",") if d) for shape in shapes)


def calls_in(f, *args):
    """How many kernel calls the compiled program of f makes."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return len(re.findall(r'custom_call_target="jax_batched\.', text))


# GMRES keeps 16 directions of each right-hand side.
@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_a_shared_factor_is_never_copied(op):
    n, count = 40, 12
    a, b = op.operands("float32", batch=(count,), n=n, nrhs=1)
    shared = jax.vmap(op, (None, 0))
    op.check((np.broadcast_to(a[0], a.shape), b), shared(a[0], b))
    assert largest_array(shared, a[0], b) < 2 * n * n
    if op.kernels:
        assert calls_in(shared, a[0], b) == 1


def test_a_shared_factor_with_columns_in_the_last_axis():
    a, _ = ops.BY_NAME["solve_triangular-0-lower"].operands("float32", n=500)
    b = np.random.default_rng(0).standard_normal((500, 10)).astype("float32")
    columns = jax.vmap(functools.partial(jb.solve_triangular, lower=True), (None, 1), 1)
    op = ops.BY_NAME["solve_triangular-0-lower"]
    op.check((a, b), columns(a, b))
    assert largest_array(columns, a, b) == 500 * 500
    assert calls_in(columns, a, b) == 1


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_factor_shared_by_an_inner_or_outer_dimension_is_never_copied(op):
    n = 24
    a, _ = op.operands("float32", batch=(3,), n=n)
    b = op.right_hand_side(np.random.default_rng(0), "float32", (3, 8), n, 1)
    inner = jax.vmap(jax.vmap(op, (None, 0)))
    op.check((np.broadcast_to(a[:, None], (3, 8, n, n)), b), inner(a, b))
    assert largest_array(inner, a, b) <= 3 * n * n
    outer = jax.vmap(jax.vmap(op), (None, 1), 1)
    assert ops.same_bits(outer(a, b), inner(a, b))
    assert largest_array(outer, a, b) <= 3 * n * n


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_shared_right_hand_side_is_never_copied(op):
    a, b = op.operands("float32", batch=(6,), n=5, nrhs=32)
    shared = jax.vmap(op, (0, None))
    op.check((a, np.broadcast_to(b[0], b.shape)), shared(a, b[0]))
    assert largest_array(shared, a, b[0]) == b.size  # the result


@pytest.mark.parametrize(
    ("a_batch", "b_batch"),
    [
        ((), ()),
        ((), (3,)),
        ((3,), ()),
        ((4, 1), (1, 5)),
        ((1, 5), (4, 1)),
        ((5,), (4, 1)),
        ((4, 1), (5,)),
        ((1,), (2, 3)),
        ((2, 3), (1, 1)),
        ((2, 1, 3), (1, 4, 1)),
        ((2, 1, 3, 1), (4, 1, 2)),
        ((1, 1), (1,)),
    ],
)
@pytest.mark.parametrize(("op", "path"), ops.by_path(ops.SUBSTITUTING), ids=ops.ids)
def test_batch_dimensions_broadcast_as_numpys_do(op, path, a_batch, b_batch):
    rng = np.random.default_rng(0)
    a = op.spoil(op.make(rng, "float64", (*a_batch, 4, 4)))
    b = op.right_hand_side(rng, "float64", b_batch, 4, 2)
    batch = np.broadcast_shapes(a_batch, b_batch)
    full = [np.broadcast_to(y, (*batch, *y.shape[-2:])) for y in (a, b)]
    op.check(full, ops.compiled(op, a, b, kernel=path))
    if op.has_info:
        assert op.with_info(a, b)[1].shape == batch


def test_batch_dimensions_of_a_general_solve_broadcast():
    op = ops.BY_NAME["solve_gen"]
    rng = np.random.default_rng(0)
    a = op.make(rng, "float64", (4, 1, 3, 3))
    b = op.right_hand_side(rng, "float64", (1, 5), 3, 2)
    op.check([np.broadcast_to(y, (4, 5, *y.shape[-2:])) for y in (a, b)], op(a, b))


@pytest.mark.parametrize("levels", (4, 6))
def test_many_alternating_broadcast_dimensions(levels):
    """As many nested vmaps make: a has every other dimension, b the rest."""
    rng = np.random.default_rng(0)
    op = SOLVE_POS[1]
    a = matrices.spd(rng, "float64", (*([2, 1] * levels), 2, 2))
    b = rng.standard_normal((*([1, 2] * levels), 2, 1))
    x = op(a, b)
    assert x.shape == (*([2] * 2 * levels), 2, 1)
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-12)


def test_two_dimensional_right_hand_side_is_a_matrix():
    """As in NumPy 2: a vector only if b has one dimension."""
    for op in ops.SOLVING:
        a, b = op.operands("float64", batch=(2,), n=2, nrhs=2)
        x = op(a, b[0])
        assert x.shape == (2, 2, 2)
        op.check((a, np.broadcast_to(b[0], b.shape)), x)


def test_operands_of_different_dtypes_are_promoted():
    a = np.eye(2, dtype=np.float32) * 2
    b = np.ones(2, np.complex128)
    x = jb.solve_triangular(a, b)
    assert x.dtype == np.complex128
    np.testing.assert_array_equal(x, b / 2)


def test_vmap_of_a_function_that_uses_info():
    def factor_or_identity(a):
        factor, info = jb.cholesky(a, return_info=True)
        return jnp.where(info == 0, factor, jnp.eye(2))

    a = jnp.stack([jnp.ones((2, 2)), 4 * jnp.eye(2)])
    np.testing.assert_array_equal(
        jax.vmap(factor_or_identity)(a), np.stack([np.eye(2), 2 * np.eye(2)])
    )
