"""Arrays beyond 2^31 bytes, where a GPU or the memory is present, and smaller ones everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb

GPU = jax.default_backend() == "gpu"


@jax.jit
def _repeats(x, first):
    """Whether every entry of x is that of its index modulo the number of the first ones."""
    index = jnp.arange(x.shape[0]) % first.shape[0]
    return jnp.all(x == first[index])


@pytest.mark.parametrize(
    "batch", (100_003, pytest.param(1_500_003, marks=pytest.mark.only_exhaustive))
)
def test_offsets_beyond_32_bits(batch, needs_memory):
    """1,500,003 matrices of 20 x 20 are 2.24 GiB; they repeat 7, the last ones too."""
    needs_memory(16 if batch > 10**6 else 2)
    op = ops.BY_NAME["cholesky-lower-mean"]
    (few,) = op.operands("float32", batch=(7,), n=20)
    many = jnp.asarray(few)[jnp.arange(batch) % 7]
    factors, info = op.with_info(many)
    first = factors[:7]
    op.check((few,), first)
    assert not info.any()
    assert _repeats(factors, first)
    np.testing.assert_array_equal(factors[-7:], np.asarray(first)[np.arange(batch - 7, batch) % 7])
    del factors, info
    b = jnp.ones((7, 20, 1), jnp.float32)
    x = jb.solve(many, b[jnp.arange(batch) % 7], assume_a="pos")
    assert _repeats(x, x[:7])
    ops.of("solve_pos")[0].check((few, np.asarray(b)), x[:7])


@pytest.mark.parametrize("batch", (3, pytest.param(258, id="258-on-a-gpu")))
def test_offsets_of_batch_times_right_hand_sides(batch, request, needs_memory):
    """Ones: the last row is 1, all others 0. 258 systems of 4096 right-hand sides are 2.1 GiB."""
    if batch > 3:
        request.getfixturevalue("needs_gpu")
    needs_memory(16 if batch > 3 else 1)
    a = jnp.ones((batch, 258, 258))
    x = jb.triangular_solve(a, jnp.ones((batch, 258, 4096)), left_side=True)
    expected = jnp.zeros((258, 1)).at[-1].set(1)
    assert jax.jit(lambda x: jnp.all(x == expected))(x)


@pytest.mark.parametrize(("n", "batch"), ((16, 262_144), (2, 262_144)))
def test_identities_up_to_the_end_of_the_arrays(n, batch, needs_memory):
    """A matrix is read and written to its end and no further, ten times over."""
    needs_memory(4)
    eye = jnp.eye(n, dtype=jnp.float32)
    a = jnp.broadcast_to(4 * eye, (batch, n, n)) + jnp.zeros((batch, 1, 1), jnp.float32)
    b = jnp.ones((batch, n, 1), jnp.float32)
    factor = jax.jit(lambda a: jnp.all(jb.cholesky(a) == 2 * eye))
    solve = jax.jit(lambda a, b: jnp.all(jb.solve(a, b, assume_a="pos") == 0.25))
    triangular = jax.jit(lambda a, b: jnp.all(jb.solve_triangular(a, b) == 0.25))
    for _ in range(10 if n == 2 else 1):
        assert factor(a)
        assert solve(a, b)
        assert triangular(a, b)


@pytest.mark.parametrize("n", (32, 64))
def test_every_matrix_of_many_is_right_in_every_run(n, needs_memory):
    """A race between the pivot and its root would spoil a few of ten thousand, now and then."""
    batch, runs = (10_240, 100) if GPU else (1_024, 10)
    needs_memory(2)
    op = ops.BY_NAME["cholesky-lower-mean"]
    (few,) = op.operands("float64", batch=(1_024,), n=n)
    a = jnp.asarray(few)[jnp.arange(batch) % len(few)]
    factor = jax.jit(jb.cholesky)
    first = factor(a)
    op.check((few,), first[: len(few)])
    assert _repeats(first, first[: len(few)])
    equal = jax.jit(lambda x, y: jnp.all(x == y))
    for _ in range(runs):
        assert equal(factor(a), first)


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_a_large_batch_of_tiny_matrices(op, needs_memory):
    """2^20 matrices of 2 x 2."""
    needs_memory(1)
    few = op.operands("float32", batch=(5,), n=2, nrhs=1)
    index = jnp.arange(2**20 + 3) % 5
    x = op(*(jnp.asarray(y)[index] for y in few))
    op.check(few, x[:5])
    assert _repeats(x, x[:5])


@pytest.mark.only_exhaustive  # CUDA's limit
@pytest.mark.parametrize("n", (3, 17))
def test_more_general_matrices_than_a_grid_has_rows(n, needs_memory):
    """65,536 and three more."""
    needs_memory(2)
    op = ops.BY_NAME["inv"]
    (few,) = op.operands("float32", batch=(7,), n=n)
    many = jnp.asarray(few)[jnp.arange(2**16 + 3) % 7]
    op.check((few,), jb.inv(few))
    for f in (jb.inv, jb.lu, jb.det, jb.slogdet, lambda a: jb.solve(a, a[..., :1])):
        for x, first in zip(jax.tree.leaves(f(many)), jax.tree.leaves(f(few)), strict=True):
            np.testing.assert_allclose(x[:7], first, rtol=1e-5, atol=1e-5)
            assert _repeats(x, x[:7])


def test_determinants_beyond_2_29_numbers(needs_gpu, needs_memory):
    """1,500,003 matrices of 20 x 20 are 2.24 GiB."""
    needs_memory(16)
    (few,) = ops.BY_NAME["inv"].operands("float32", batch=(7,), n=20)
    many = jnp.asarray(few)[jnp.arange(1_500_003) % 7]
    for f, numpys in ((jb.det, np.linalg.det), (jb.slogdet, np.linalg.slogdet)):
        for x, first in zip(jax.tree.leaves(f(many)), jax.tree.leaves(numpys(few)), strict=True):
            np.testing.assert_allclose(x[:7], first, rtol=1e-4)
            assert _repeats(x, x[:7])
