"""Programs of other packages give the same numbers on our kernels as on JAX's routines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_batched as jb


@pytest.fixture
def programs(benchmark_module):
    """The module whose programs are timed."""
    return benchmark_module("override")


@pytest.fixture
def with_and_without(monkeypatch):
    """Runs a program with JAX's routines and with ours; the second one must call our kernels."""
    calls = []
    original = jax.ffi.ffi_lowering

    def spy(name, *args, **kwargs):
        calls.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(jax.ffi, "ffi_lowering", spy)

    def run(program, *targets):
        jax.clear_caches()
        expected = jax.tree.map(np.asarray, program())
        assert not calls
        jax.clear_caches()
        with jb.override_jax_linalg():
            ours = jax.tree.map(np.asarray, program())
        jax.clear_caches()
        assert set(calls) == {f"jax_batched.{target}.v1" for target in targets}
        return ours, expected

    return run


def data(n=12):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 5, n))
    return jnp.asarray(x), jnp.asarray(np.sin(x) + 0.1 * rng.normal(size=n))


@pytest.mark.only_exhaustive  # the sampler takes long to compile
def test_gaussian_process_regression_by_nuts(with_and_without, programs):
    pytest.importorskip("numpyro")
    program = functools.partial(programs.posterior, *data(), 2, jax.random.key(0))
    ours, expected = with_and_without(program, "cholesky", "triangular_solve")
    for name in ("scale", "length", "noise"):
        assert np.ptp(ours[name]) > 0
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-6)


def test_lineax_with_its_cholesky_solver_mapped_and_differentiated(with_and_without, programs):
    pytest.importorskip("lineax")
    solve = jax.vmap(programs.spd_solve)
    rng = np.random.default_rng(1)
    root = rng.normal(size=(4, 5, 5))
    a = jnp.asarray(root @ np.swapaxes(root, -1, -2) + 5 * np.eye(5))
    b = jnp.asarray(rng.normal(size=(4, 5)))

    def program():
        x = jax.jit(solve)(a, b)
        gradients = jax.jit(jax.grad(lambda a, b: jnp.sum(solve(a, b) ** 2), (0, 1)))
        return x, gradients(a, b)

    ours, expected = with_and_without(program, "cholesky", "triangular_solve")
    np.testing.assert_allclose(np.einsum("bij,bj->bi", a, ours[0]), b, rtol=1e-10)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)


def test_tinygp_marginal_likelihood(with_and_without, programs):
    pytest.importorskip("tinygp")
    loss = functools.partial(programs.marginal_likelihood, *data())

    def program():
        start = jnp.array([[0.0, 0.0, -2.0], [0.5, -0.5, -3.0], [1.0, 0.3, -1.0]])
        return jax.jit(jax.vmap(jax.value_and_grad(loss)))(start)

    ours, expected = with_and_without(program, "cholesky", "triangular_solve")
    for x1, x2 in zip(ours, expected, strict=True):
        np.testing.assert_allclose(x1, x2, rtol=1e-9)


def test_natural_gradient_steps_with_optax(with_and_without):
    """An optimizer's state and updates pass through; the step solves a damped normal matrix."""
    optax = pytest.importorskip("optax")
    x, y = data(30)
    features = jnp.stack([jnp.ones_like(x), x, jnp.sin(x), jnp.cos(x)], axis=-1)

    def program():
        optimizer = optax.adam(0.1)

        def step(state, _):
            weights, moments = state
            gradient = features.T @ (features @ weights - y)
            fisher = features.T @ features + 0.1 * jnp.eye(4)
            direction = jax.scipy.linalg.solve(fisher, gradient, assume_a="pos")
            updates, moments = optimizer.update(direction, moments)
            return (optax.apply_updates(weights, updates), moments), None

        weights = jnp.zeros(4)
        start = weights, optimizer.init(weights)
        return jax.jit(lambda start: jax.lax.scan(step, start, None, length=20)[0][0])(start)

    ours, expected = with_and_without(program, "cholesky", "triangular_solve")
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(2).normal(size=shape))


@pytest.mark.parametrize(
    ("solver", "rows", "targets"),
    [
        ("LU", 5, ("lu", "triangular_solve")),
        ("QR", 9, ("qr_multiply", "triangular_solve")),  # factors "raw", by JAX
    ],
)
def test_lineax_with_other_solvers(with_and_without, programs, solver, rows, targets):
    pytest.importorskip("lineax")
    a, b = normal(4, rows, 5), normal(4, rows)
    solve = jax.jit(jax.vmap(functools.partial(programs.general_solve, solver=solver)))
    ours, expected = with_and_without(lambda: solve(a, b), *targets)
    np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_steps_of_a_simulator(with_and_without, programs):
    root = normal(3, 6, 6)
    mass, jacobian, force = root @ root.mT + jnp.eye(6), normal(3, 4, 6), normal(3, 6)
    step = jax.jit(jax.vmap(programs.constraint_forces))
    ours, expected = with_and_without(
        lambda: step(mass, jacobian, force), "cholesky", "triangular_solve"
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-9)
    assert (np.einsum("bij,bj->bi", mass, expected) != force).any()  # some constraint is active


def test_soap(with_and_without, programs):
    gradient, left, right = normal(3, 2, 6, 6)
    step = jax.jit(jax.vmap(programs.soap_step))
    ours, expected = with_and_without(
        lambda: step(gradient, left @ left.mT, right @ right.mT), "eigh", "qr"
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-8)
