"""Programs of JAX and other packages with and without `jax_batched.override_jax_linalg()`.

`python -m benchmarks.override docs/compatibility.md` fills the section `override` of the document.
Needs numpyro, tinygp and lineax. Results with and without are compared before they are timed.
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
    chains = 256 // scale
    yield Case(
        f"NumPyro, NUTS, 10 steps of {chains} chains, 50 points",
        functools.partial(posterior, x[::2], y[::2], chains),
        (jax.random.key(0),),
        1e-3,
    )


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
    documents.fill(options.document, {"override": made})


if __name__ == "__main__":
    main()
