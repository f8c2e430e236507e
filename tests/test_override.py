"""JAX's own functions on our kernels: what JAX documents of them holds with and without."""

import functools
import itertools
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import ops
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_batched as jb
from jax_batched import _matrices as matrices

TARGETS = {"jax_batched.cholesky.v1", "jax_batched.triangular_solve.v1"}


def spd(dtype, batch=(3,), n=5, seed=0):
    return matrices.spd(np.random.default_rng(seed), dtype, (*batch, n, n)).astype(dtype)


def rhs(dtype, batch=(3,), n=5, nrhs=2, seed=1):
    return matrices.normal(np.random.default_rng(seed), dtype, (*batch, n, nrhs)).astype(dtype)


def triangular(dtype, batch=(3,), n=5, seed=2):
    return matrices.triangular(np.random.default_rng(seed), dtype, (*batch, n, n)).astype(dtype)


def lowered(f, *args, platforms=None, **jit_options):
    """The program's text, lowered now: a fresh function is in none of JAX's caches."""
    traced = jax.jit(lambda *xs: f(*xs), **jit_options).trace(*args)
    return traced.lower(lowering_platforms=platforms).as_text()


def targets(text):
    return {target for target in TARGETS if target in text}


def compiled(f, *args):
    """f(*args), compiled now."""
    return jax.tree.map(np.asarray, jax.jit(lambda *xs: f(*xs))(*args))


def cho_solve(a, b, lower):
    return jsl.cho_solve(jsl.cho_factor(a, lower=lower), b)


def solve_pos(a, b, lower=False):
    """One system at a time: some versions of JAX warn of themselves for a batch."""
    f = functools.partial(jsl.solve, assume_a="pos", lower=lower)
    for _ in range(a.ndim - 2):
        f = jax.vmap(f)
    return f(a, b)


# JAX's functions and the kernels they come to.
CHOLESKY = {
    "jnp.linalg.cholesky": jnp.linalg.cholesky,
    "jnp.linalg.cholesky-upper": functools.partial(jnp.linalg.cholesky, upper=True),
    "jnp.linalg.cholesky-triangle": functools.partial(jnp.linalg.cholesky, symmetrize_input=False),
    "scipy.cholesky": jsl.cholesky,
    "scipy.cholesky-lower": functools.partial(jsl.cholesky, lower=True),
    "lax.cholesky": functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False),
}
POSITIVE = {
    "scipy.cho_solve": functools.partial(cho_solve, lower=False),
    "scipy.cho_solve-lower": functools.partial(cho_solve, lower=True),
    "scipy.solve-pos": solve_pos,
    "scipy.solve-pos-lower": functools.partial(solve_pos, lower=True),
}
TRIANGULAR = {
    f"scipy.solve_triangular-{trans}-{'lower' if lower else 'upper'}{'-unit' * unit}": (
        functools.partial(jsl.solve_triangular, trans=trans, lower=lower, unit_diagonal=unit)
    )
    for trans, lower, unit in itertools.product((0, 1, 2), (False, True), (False, True))
}
WORK = {
    **{name: (f, {"jax_batched.cholesky.v1"}) for name, f in CHOLESKY.items()},
    **{name: (f, TARGETS) for name, f in POSITIVE.items()},
    **{name: (f, {"jax_batched.triangular_solve.v1"}) for name, f in TRIANGULAR.items()},
}
REPRESENTATIVE = (
    "jnp.linalg.cholesky",
    "scipy.solve-pos",
    "scipy.solve_triangular-2-upper",
    "scipy.solve_triangular-1-lower-unit",
)
each_function = pytest.mark.parametrize("name", WORK)


def operands(name, dtype, **shape):
    if name in CHOLESKY:
        return (spd(dtype, **shape),)
    make = spd if name in POSITIVE else triangular
    return make(dtype, **shape), rhs(dtype, **shape)


@pytest.mark.parametrize("platform", ("cpu", "cuda"))
@each_function
def test_lowers_to_our_kernels_inside_the_context_alone(name, platform):
    f, expected = WORK[name]
    xs = operands(name, "float32")
    before = lowered(f, *xs, platforms=(platform,))
    with jb.override_jax_linalg():
        assert targets(lowered(f, *xs, platforms=(platform,))) == expected
    assert not targets(before)
    assert lowered(f, *xs, platforms=(platform,)) == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(WORK, ("float32", "complex128")),
        *itertools.product(REPRESENTATIVE, ("float64", "complex64")),
    ],
)
def test_values_are_those_of_jax(name, dtype):
    f, _ = WORK[name]
    xs = operands(name, dtype)
    expected = compiled(f, *xs)
    with jb.override_jax_linalg():
        ours = compiled(f, *xs)
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, atol=200 * np.finfo(dtype).eps * scale)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_derivatives_are_those_of_jax(name, dtype):
    """Forward, reverse, forward over reverse, and mapped: JAX's own rules in both cases."""
    f, _ = WORK[name]
    xs = operands(name, dtype, batch=())
    along = operands(name, dtype, batch=(), seed=7)
    stacked = [np.stack([x, 2 * x]) for x in xs]

    def loss(*xs):
        y = f(*xs)
        return jnp.sum(jnp.abs(jnp.sin(y)) ** 2)

    gradient = jax.grad(loss, tuple(range(len(xs))))

    def all_of_them():
        return [
            compiled(lambda *xs: jax.jvp(f, xs, along), *xs),
            compiled(gradient, *xs),
            compiled(lambda *xs: jax.jvp(gradient, xs, along), *xs),
            compiled(jax.vmap(gradient), *stacked),
        ]

    expected = all_of_them()
    with jb.override_jax_linalg():
        assert targets(lowered(gradient, *xs))
        ours = all_of_them()
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * np.abs(y).max())


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("upper", (False, True))
def test_failed_matrices_are_nan_as_in_jax(dtype, upper):
    f = functools.partial(jnp.linalg.cholesky, upper=upper)
    a = spd(dtype, batch=(4,))
    a[1] = np.ones((5, 5))
    a[2, 3, 3] = np.nan
    expected = compiled(f, a)
    with jb.override_jax_linalg():
        ours = compiled(f, a)
    healthy = [0, 3]
    np.testing.assert_array_equal(np.isnan(ours[:2]), np.isnan(expected[:2]))
    np.testing.assert_allclose(ours[healthy], expected[healthy], rtol=1e-4)
    # Some LAPACKs do not count a NaN as a failure and leave the columns before it.
    data = np.tri(5, dtype=bool).T if upper else np.tri(5, dtype=bool)
    np.testing.assert_array_equal(np.isnan(ours[2]), data)
    assert np.isnan(expected[2]).any() and not (np.isnan(expected[2]) & ~data).any()


def test_what_is_not_read_stays_unread():
    a, b = triangular("float64"), rhs("float64")
    a[..., ~np.tri(5, dtype=bool)] = np.nan
    expected = compiled(functools.partial(jsl.solve_triangular, lower=True), a, b)
    with jb.override_jax_linalg():
        ours = compiled(functools.partial(jsl.solve_triangular, lower=True), a, b)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_vmap_in_every_way():
    a, b = triangular("float64"), rhs("float64")

    def f(a, b):
        return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    def results():
        return [
            compiled(jax.vmap(f), a, b),
            compiled(jax.vmap(f, (None, 0)), a[0], b),
            compiled(jax.vmap(f, (0, None)), a, b[0]),
            compiled(jax.vmap(f, (2, 1), 1), np.moveaxis(a, 0, 2), np.moveaxis(b, 0, 1)),
            compiled(jax.vmap(lambda b: f(a[0], b[:, None])[:, 0], 1, 1), b[0]),
        ]

    expected = results()
    with jb.override_jax_linalg():
        ours = results()
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)


FALLS_THROUGH = {
    "n above the kernels' range": (jnp.linalg.cholesky, [((1, 513, 513), "float32")]),
    "no rows": (jnp.linalg.cholesky, [((3, 0, 0), "float32")]),
    "no right-hand sides": (
        TRIANGULAR["scipy.solve_triangular-0-lower"],
        [((3, 3), "float32"), ((3, 0), "float32")],
    ),
    "bfloat16": (
        functools.partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True),
        [((3, 4, 4), "bfloat16"), ((3, 4, 2), "bfloat16")],
    ),
    "float16": (
        functools.partial(jax.lax.linalg.triangular_solve, lower=True),
        [((3, 4, 4), "float16"), ((3, 2, 4), "float16")],
    ),
}


@pytest.mark.parametrize("case", FALLS_THROUGH)
@pytest.mark.parametrize("platform", ("cpu", "cuda"))
def test_calls_without_a_kernel_keep_jaxs_lowering(case, platform):
    f, shapes = FALLS_THROUGH[case]
    xs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    expected = lowered(f, *xs, platforms=(platform,))
    with jb.override_jax_linalg():
        assert lowered(f, *xs, platforms=(platform,)) == expected


def test_other_platforms_and_several_at_once():
    a = spd("float32")
    tpu = lowered(jnp.linalg.cholesky, a, platforms=("tpu",))
    with jb.override_jax_linalg():
        assert lowered(jnp.linalg.cholesky, a, platforms=("tpu",)) == tpu
        text = lowered(jnp.linalg.cholesky, a, platforms=("cpu", "cuda", "tpu"))
        assert text.count("@jax_batched.cholesky.v1") == 2
        assert "stablehlo.cholesky" in text


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_export_takes_our_disabled_checks(name):
    """The way out of JAX's error is found by its sentence, or by the name of the target."""
    f, expected = WORK[name]
    xs = operands(name, "float64")
    sentence = "custom calls whose targets have no compatibility guarantees"
    with jb.override_jax_linalg():
        with pytest.raises(ValueError, match=sentence) as error:
            jax.export.export(jax.jit(lambda *xs: f(*xs)))(*xs)
        exported = jax.export.export(
            jax.jit(lambda *xs: f(*xs)), disabled_checks=jb.export_disabled_checks()
        )(*xs)
    assert targets(str(error.value)) == targets(exported.mlir_module()) == expected
    np.testing.assert_allclose(exported.call(*xs), compiled(f, *xs), rtol=1e-10)
    page = (Path(__file__).parents[1] / "docs" / "how_to" / "export.md").read_text()
    for searched in (sentence, *(f"@{target}" for target in expected)):
        assert searched in page


def test_our_own_operations_beyond_their_range_still_end_in_jax():
    """Their fallback is JAX's primitive, which the override must not send back to them."""
    a = jax.ShapeDtypeStruct((2, 513, 513), "float32")
    b = jax.ShapeDtypeStruct((2, 513, 1), "float32")
    solve = functools.partial(jb.solve, assume_a="pos")
    expected = lowered(solve, a, b)
    with jb.override_jax_linalg():
        assert lowered(solve, a, b) == expected


def lowers_to_us():
    return bool(targets(lowered(jnp.linalg.cholesky, spd("float32"))))


def test_nested_contexts():
    with jb.override_jax_linalg():
        with jb.override_jax_linalg():
            assert lowers_to_us()
        assert lowers_to_us()
    assert not lowers_to_us()


def test_an_exception_ends_the_override():
    with pytest.raises(KeyError), jb.override_jax_linalg():
        raise KeyError
    assert not lowers_to_us()


def test_as_a_function_it_lasts_until_undone():
    first = jb.override_jax_linalg()
    try:
        assert lowers_to_us()
        second = jb.override_jax_linalg()
        first.undo()
        first.undo()
        assert lowers_to_us()
        with jb.override_jax_linalg():
            second.undo()
            assert lowers_to_us()
        assert not lowers_to_us()
    finally:
        first.undo()
        second.undo()


def test_it_holds_in_other_threads():
    seen = []
    with jb.override_jax_linalg():
        thread = threading.Thread(target=lambda: seen.append(lowers_to_us()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_what_was_compiled_keeps_what_it_has():
    a = spd("float32")
    outside = jax.jit(lambda a: jnp.linalg.cholesky(a))
    inside = jax.jit(lambda a: jnp.linalg.cholesky(a))
    outside(a)
    with jb.override_jax_linalg():
        inside(a)
        assert not targets(outside.lower(a).as_text())
        jax.clear_caches()
        assert targets(outside.lower(a).as_text())
    assert targets(inside.lower(a).as_text()) == set()
    assert targets(outside.lower(a).as_text())
    jax.clear_caches()
    assert not targets(outside.lower(a).as_text())


def test_a_sharded_batch_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu"))
    a = jax.device_put(spd("float64", batch=(8,)), NamedSharding(mesh, P("x")))
    b = jax.device_put(rhs("float64", batch=(8,)), NamedSharding(mesh, P("x")))
    expected = compiled(solve_pos, a, b)
    with jb.override_jax_linalg():
        program = jax.jit(lambda a, b: solve_pos(a, b)).lower(a, b).compile()
    assert targets(program.as_text()) == TARGETS
    assert "all-gather" not in program.as_text()
    x = program(a, b)
    assert x.sharding.is_equivalent_to(a.sharding, 3)
    np.testing.assert_allclose(x, expected, rtol=1e-10)
