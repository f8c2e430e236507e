"""Calls are captured into CUDA graphs (XLA's command buffers). Needs a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest

# 20 small solves, unrolled and in a loop. The first call of the process is the first in a capture
# too: kernels are loaded lazily.
PROGRAM = """
import json, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import jax_batched as jb

rng = np.random.default_rng(0)
a = rng.normal(size=(1000, 8, 8)).astype("float32")
a = jnp.asarray(a @ np.swapaxes(a, 1, 2) + 8 * np.eye(8, dtype="float32"))
b = jnp.asarray(rng.normal(size=(1000, 8, 1)).astype("float32"))

def step(x):
    return jb.cho_solve((jb.cholesky(a, symmetrize_input=False), True), x) + jb.solve(
        a, x, assume_a="pos", lower=True
    )

def unrolled(x):
    for _ in range(20):
        x = step(x)
    return x

def loop(x):
    return jax.lax.scan(lambda x, _: (step(step(x)), None), x, None, length=10)[0]

results = {}
for f in (unrolled, loop):
    program = jax.jit(f).lower(b).compile()
    results[f.__name__] = np.asarray(program(b))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(20):
            x = program(b)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - start) / 20)
    results[f"{f.__name__}-seconds"] = np.median(times)
np.savez(sys.argv[1], **results)
"""


def run(folder, name, graphs, **environment):
    """Results and times of a fresh process, and whether what XLA dumped shows a command buffer."""
    flags = [f"--xla_dump_to={folder / name}", "--xla_dump_hlo_as_text"]
    if not graphs:
        flags += ["--xla_gpu_enable_command_buffer="]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / f"{name}.npz")],
        check=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "XLA_FLAGS": " ".join(flags), **environment},
    )
    # Its place is the schedule of thunks or, in older versions, the optimized program.
    dumped = [
        file
        for pattern in ("*thunk_sequence*", "*after_optimizations.txt")
        for file in (folder / name).glob(pattern)
    ]
    assert dumped
    captured = any(
        re.search(r"kCommandBuffer|^%?command_buffer", file.read_text(), re.MULTILINE)
        for file in dumped
    )
    return np.load(folder / f"{name}.npz"), captured


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    folder = tmp_path_factory.mktemp("graphs")
    return {
        "on": run(folder, "on", True),
        "off": run(folder, "off", False),
        # Little memory is left for the driver, which loads kernels and builds graphs.
        "full": run(
            folder,
            "full",
            True,
            XLA_PYTHON_CLIENT_PREALLOCATE="true",
            XLA_PYTHON_CLIENT_MEM_FRACTION="0.95",
        ),
    }


def test_calls_are_captured(runs):
    assert runs["on"][1] and runs["full"][1]
    assert not runs["off"][1]


@pytest.mark.parametrize("name", ("unrolled", "loop"))
def test_results_are_the_same_bits(runs, name):
    expected = runs["off"][0][name]
    assert np.isfinite(expected).all()
    for how in ("on", "full"):
        np.testing.assert_array_equal(runs[how][0][name], expected)


@pytest.mark.parametrize("name", ("unrolled", "loop"))
def test_graphs_are_faster(runs, name):
    seconds = {how: float(runs[how][0][f"{name}-seconds"]) for how in runs}
    print(json.dumps({name: seconds}))
    assert seconds["on"] < seconds["off"]
