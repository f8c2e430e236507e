"""Programs of JAX and other packages with and without `jax_batched.override_jax_linalg()`.

`python -m benchmarks.override docs/compatibility.md` fills the section `override` of the document,
on a CPU `override_cpu`. Needs dynamax, gpjax, lineax, numpyro, optimistix and tinygp. Results with
and without are compared before they are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
from jax.experimental import checkify

import jax_batched as jb
from benchmarks import documents, results, timing
from benchmarks.implementations import Program, on_cpu
from benchmarks.inputs import MAKERS


class Case(NamedTuple):
    """A program, what it is called with, and how close two results of it are."""

    name: str
    program: Callable[..., Any]
    operands: tuple[Any, ...]
    rtol: float


def spd_solve(a: jax.Array, b: jax.Array) -> Any:
    """One system by lineax and its own Cholesky solver."""
    import lineax

    operator = lineax.MatrixLinearOperator(a, lineax.positive_semidefinite_tag)
    return lineax.linear_solve(operator, b, solver=lineax.Cholesky()).value


def marginal_likelihood(x: jax.Array, y: jax.Array, parameters: jax.Array) -> jax.Array:
    """Of a Gaussian process, by tinygp."""
    import tinygp

    kernel = jnp.exp(parameters[0]) * tinygp.kernels.Matern52(jnp.exp(parameters[1]))
    process = tinygp.GaussianProcess(kernel, x, diag=jnp.exp(parameters[2]))
    return -process.log_probability(y)


def posterior(x: jax.Array, y: jax.Array, chains: int, key: jax.Array) -> Any:
    """Samples of a Gaussian process's parameters, by NumPyro's NUTS, all chains side by side."""
    import numpyro

    def model() -> None:
        scale = numpyro.sample("scale", numpyro.distributions.LogNormal(0.0, 1.0))
        length = numpyro.sample("length", numpyro.distributions.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", numpyro.distributions.LogNormal(-1.0, 1.0))
        covariance = scale * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        covariance += (noise + 1e-6) * jnp.eye(len(x))
        mean = jnp.zeros_like(x)
        numpyro.sample("y", numpyro.distributions.MultivariateNormal(mean, covariance), obs=y)

    # Trees of one depth: with and without, the same work.
    kernel = numpyro.infer.NUTS(model, max_tree_depth=3)
    mcmc = numpyro.infer.MCMC(
        kernel,
        num_warmup=5,
        num_samples=5,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=False,
    )
    mcmc.run(key)
    return mcmc.get_samples()


def general_solve(a: jax.Array, b: jax.Array, solver: str) -> Any:
    """One system or least squares problem by a solver of lineax."""
    import lineax

    operator = lineax.MatrixLinearOperator(a)
    return lineax.linear_solve(operator, b, solver=getattr(lineax, solver)()).value


def fitted_decay(times: jax.Array, values: jax.Array) -> Any:
    """Amplitude, rate and offset of one decay, by Levenberg-Marquardt's method of optimistix."""
    import optimistix

    def residuals(parameters: jax.Array, _: None) -> jax.Array:
        amplitude, rate, offset = parameters
        return amplitude * jnp.exp(-rate * times) + offset - values

    solver = optimistix.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
    start = jnp.ones(3, values.dtype)
    return optimistix.least_squares(residuals, solver, start, max_steps=16, throw=False).value


def smoothed(parameters: Any, series: jax.Array) -> Any:
    """Means of the states of one series, by dynamax's Kalman smoother."""
    from dynamax.linear_gaussian_ssm import lgssm_smoother

    return lgssm_smoother(parameters, series).smoothed_means


def state_space(states: int, size: int) -> Any:
    """Parameters of one of dynamax's linear Gaussian models."""
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    return LinearGaussianSSM(states, size).initialize(
        dynamics_weights=0.95 * jnp.eye(states), emission_weights=jnp.eye(size, states)
    )[0]


def regression(x: jax.Array, y: jax.Array, length: jax.Array) -> Any:
    """Negative marginal likelihood of a Gaussian process, by GPJax."""
    import gpjax

    data = gpjax.Dataset(x[:, None], y[:, None])
    kernel = gpjax.kernels.RBF(lengthscale=length)
    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Zero(), kernel=kernel)
    likelihood = gpjax.likelihoods.Gaussian(num_datapoints=len(x), obs_stddev=0.1)
    return -gpjax.objectives.conjugate_mll(prior * likelihood, data)


def constraint_forces(mass: jax.Array, jacobian: jax.Array, force: jax.Array) -> Any:
    """Accelerations of one world of a simulator: Newton's steps on a cost with active constraints,
    each with a Cholesky factorization, as MuJoCo's solver takes them."""

    def step(acceleration: jax.Array, _: None) -> tuple[jax.Array, None]:
        violated = (jacobian @ acceleration < 0).astype(force.dtype)
        hessian = mass + (jacobian.T * violated) @ jacobian
        gradient = mass @ acceleration - force + jacobian.T @ (violated * (jacobian @ acceleration))
        return acceleration - jsl.cho_solve(jsl.cho_factor(hessian), gradient), None

    return jax.lax.scan(step, jnp.zeros_like(force), length=5)[0]


def soap_step(gradient: jax.Array, left: jax.Array, right: jax.Array) -> Any:
    """Two steps of SOAP for one weight matrix: eigenvectors of what it has seen, then these by a
    step of orthogonal iteration, and the gradient in that basis (Vyas et al., 2024)."""
    seen = left, right
    left = 0.95 * left + 0.05 * gradient @ gradient.T
    right = 0.95 * right + 0.05 * gradient.T @ gradient
    of_left, of_right = (
        jnp.linalg.qr(now @ jnp.linalg.eigh(before)[1])[0]
        for before, now in zip(seen, (left, right), strict=True)
    )
    rotated = of_left.T @ gradient @ of_right
    return of_left @ (rotated / jnp.sqrt(rotated**2 + 0.01)) @ of_right.T


def cases(dtype: str, scale: int) -> Iterator[Case]:
    """All programs; batches shrink with the scale."""

    def spd(n: int, nrhs: int, batch: int) -> tuple[jax.Array, jax.Array]:
        key = jax.random.key(0)
        return MAKERS["spd"](key, dtype, n, nrhs, batch), MAKERS["rhs"](key, dtype, n, nrhs, batch)

    rtol = 200 * float(np.finfo(dtype).eps)
    batch = 32768 // scale
    a, b = spd(32, 1, batch)
    vectors = b[..., 0]
    size = f"{batch} x 32 x 32"
    yield Case(f"`jnp.linalg.cholesky`, {size}", jnp.linalg.cholesky, (a,), rtol)
    solve = functools.partial(jsl.solve, assume_a="pos")
    yield Case(f"`jax.scipy.linalg.solve`, `pos`, {size}", jax.vmap(solve), (a, vectors), rtol)

    def factor_and_solve(a: jax.Array, b: jax.Array) -> Any:
        return jsl.cho_solve(jsl.cho_factor(a), b)

    yield Case(f"`cho_factor`, `cho_solve`, {size}", jax.vmap(factor_and_solve), (a, vectors), rtol)
    forward = functools.partial(jsl.solve_triangular, lower=True)
    yield Case(f"`solve_triangular`, {size}", jax.vmap(forward), (jnp.tril(a), vectors), rtol)
    yield Case(f"lineax, {size}", jax.vmap(spd_solve), (a, vectors), rtol)

    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(spd_solve)(a, b) ** 2)

    yield Case(f"lineax, gradient, {size}", jax.grad(loss, (0, 1)), (a, vectors), 10 * rtol)

    rng = np.random.default_rng(0)
    count, models = 100, 1024 // scale
    x = jnp.asarray(np.sort(rng.uniform(0, 10, count)), dtype)
    y = jnp.asarray(np.sin(x) + 0.1 * rng.normal(size=count), dtype)
    start = jnp.asarray(rng.normal(size=(models, 3)) * 0.3 + [0.0, 0.0, -2.0], dtype)
    likelihood = jax.value_and_grad(functools.partial(marginal_likelihood, x, y))
    yield Case(
        f"tinygp, likelihood and gradient, {models} models of {count} points",
        jax.vmap(likelihood),
        (start,),
        1e4 * rtol,
    )
    yield from of_packages(dtype, scale, x, y)
    chains = 256 // scale
    yield Case(
        f"NumPyro, NUTS, 10 steps of {chains} chains, 50 points",
        functools.partial(posterior, x[::2], y[::2], chains),
        (jax.random.key(0),),
        1e-3,
    )


def of_packages(dtype: str, scale: int, x: jax.Array, y: jax.Array) -> Iterator[Case]:
    """Programs of other packages, or as they are in them; x and y are points of a curve."""
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    loose = 1e4 * float(np.finfo(dtype).eps)
    batch = 32768 // scale
    square = normal(batch, 16, 16) + 4 * jnp.eye(16, dtype=dtype)
    lu, qr = (functools.partial(general_solve, solver=name) for name in ("LU", "QR"))
    yield Case(f"lineax, LU, {batch} x 16 x 16", jax.vmap(lu), (square, normal(batch, 16)), loose)
    tall = normal(batch, 16, 8)
    yield Case(f"lineax, QR, {batch} x 16 x 8", jax.vmap(qr), (tall, normal(batch, 16)), loose)
    root = normal(batch // 4, 27, 27) / 27**0.5
    mass = root @ root.mT + jnp.eye(27, dtype=dtype)
    world = mass, normal(batch // 4, 12, 27), normal(batch // 4, 27)
    name = f"Newton's steps of a simulator, {batch // 4} worlds of 27 joints"
    yield Case(name, jax.vmap(constraint_forces), world, loose)
    gradient, *seen = normal(3, batch // 16, 32, 32)
    left, right = (x @ x.mT for x in seen)
    name = f"SOAP, {batch // 16} matrices of 32 x 32"
    yield Case(name, jax.vmap(soap_step), (gradient, left, right), 0.1)
    if dtype != "float64":  # with 64 bits enabled these three packages mix both
        return
    times = jnp.linspace(0, 3, 20)
    decays = 2 * jnp.exp(-jnp.exp(0.3 * normal(batch, 1)) * times) + 0.5 + 0.01 * normal(batch, 20)
    fit = functools.partial(fitted_decay, times)
    yield Case(f"optimistix, {batch} curves of 20 points", jax.vmap(fit), (decays,), 1e-2)
    series = normal(4096 // scale, 50, 2)
    name = f"dynamax, smoother, {len(series)} series of 50 points"
    smoother = jax.vmap(smoothed, (None, 0))
    yield Case(name, smoother, (state_space(4, 2), series), loose)
    lengths = jnp.exp(0.3 * normal(1024 // scale))
    likelihood = jax.value_and_grad(functools.partial(regression, x[::2], y[::2]))
    checked = jax.vmap(checkify.checkify(likelihood))  # GPJax asserts
    name = f"GPJax, likelihood and gradient, {len(lengths)} models of 50 points"
    yield Case(name, lambda lengths: checked(lengths)[1], (lengths,), 1e-6)


def call(compiled: Any, operands: tuple[Any, ...]) -> list[Any]:
    """The outputs; on a CPU, whose calls would run beside each other, when they are there."""
    outputs = [compiled(*operands)]
    return jax.block_until_ready(outputs) if on_cpu() else outputs


def measure(case: Case, repetitions: int) -> tuple[float, float]:
    """Milliseconds without and with the override; results must be alike."""
    timed, outputs = {}, {}
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "without": contextlib.nullcontext,
        "with": jb.override_jax_linalg,
    }
    for name, way in ways.items():
        jax.clear_caches()  # what is compiled keeps the routines that it has
        with way():
            compiled = jax.jit(case.program).lower(*case.operands).compile()
        outputs[name] = jax.tree.map(np.asarray, compiled(*case.operands))
        run = functools.partial(call, compiled, case.operands)
        program = Program(run, jax.block_until_ready, 1)
        timed[name] = program, timing.calibrate(program)
    for x, y in zip(*map(jax.tree.leaves, outputs.values()), strict=True):
        error = np.abs(x - y).max() / np.abs(x).max()
        if not error <= case.rtol:
            raise SystemExit(f"{case.name}: results differ by {error:.1e}")
    times = timing.measure(timed, repetitions)
    return times["without"], times["with"]


def table(dtypes: Sequence[str], scale: int, repetitions: int) -> Iterator[str]:
    """One row per program."""
    yield results.stamp(results.device_name(), results.versions())
    yield ""
    yield "| program | dtype | without | with | speed-up |"
    yield "|---|---|---:|---:|---:|"
    for dtype in dtypes:
        for case in cases(dtype, scale):
            without, ours = measure(case, repetitions)
            row = f"| {case.name} | {dtype} | {without:.3g} ms | {ours:.3g} ms |"
            yield f"{row} **{without / ours:.2g}x** |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and fill one document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.override",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("document", type=Path, help="a Markdown file")
    add("--dtype", nargs="+", default=["float32", "float64"])
    add("--divide", type=int, default=1, help="batches by this")
    add("--repetitions", type=int, default=timing.MIN_REPETITIONS)
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    made = functools.partial(table, options.dtype, options.divide, options.repetitions)
    documents.fill(options.document, {"override_cpu" if on_cpu() else "override": made})


if __name__ == "__main__":
    main()
