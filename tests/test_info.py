"""What the library says about itself, and that it is importable everywhere."""

import os
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _ffi

SOLVE_POS = ops.of("solve_pos")

PLATFORMS = ("cpu", "cuda", "other")


def run(*arguments, **environment):
    """Output of a fresh interpreter, away from the source tree, which would shadow an install."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_backend_info_has_a_path_and_a_reason_for_everything():
    rows = {(row.operation, row.platform): row for row in jb.backend_info()}
    for operation in {op.operation for op in ops.WITH_KERNELS}:
        for platform in PLATFORMS:
            row = rows[operation, platform]
            assert row.path in ("kernel", "lax")
            assert (row.max_n > 0) == (row.path == "kernel")
            assert row.reason
        assert rows[operation, "cpu"].path == "kernel"
        assert rows[operation, "other"].path == "lax"


def test_backend_info_says_what_the_lowering_does():
    platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    rows = {(row.operation, row.platform): row for row in jb.backend_info()}
    for op in ops.ONE_EACH:
        row = rows[op.operation, platform]
        for n in (1, 3, 512, 513):
            operands = op.operands("float32", n=n)
            text = jax.jit(op).lower(*operands).as_text()
            assert ("jax_batched." in text) == (row.path == "kernel" and n <= row.max_n)


def test_info_program_prints_the_table():
    text = run("-m", "jax_batched.info")
    assert jb.__version__ in text
    assert jax.__version__ in text
    for row in jb.backend_info():
        line = rf"{re.escape(row.operation)} +{row.platform} +{row.path} "
        assert re.search(line, text), line


def test_info_program_names_the_command_that_builds_the_cuda_module():
    there = _ffi.native_module("cuda") is not None
    assert (_ffi.CUDA_BUILD_COMMAND in run("-m", "jax_batched.info")) != there


@pytest.fixture
def without_the_cuda_module(monkeypatch):
    """Lowering as in a process without the CUDA module that sees these devices of CUDA."""

    def pretend(*devices):
        monkeypatch.setitem(_ffi._loaded, "cuda", (None, "it was not built"))
        monkeypatch.setattr(_ffi, "devices", lambda platform: devices)

    _ffi._warn_of_missing_cuda_module.cache_clear()
    yield pretend
    _ffi._warn_of_missing_cuda_module.cache_clear()


def calls_a_kernel(op, platform, n=3):
    f = jax.jit(lambda *operands: op(*operands))
    text = f.trace(*op.operands("float32", n=n)).lower(lowering_platforms=(platform,)).as_text()
    return "jax_batched." in text


def test_a_gpu_without_the_cuda_module_warns_once(without_the_cuda_module):
    without_the_cuda_module("a GPU")
    op, *others = ops.ONE_EACH
    with pytest.warns(RuntimeWarning, match=re.escape(_ffi.CUDA_BUILD_COMMAND)) as caught:
        assert not calls_a_kernel(op, "cuda")
    assert len(caught) == 1
    assert "it was not built" in str(caught[0].message)
    for op in others:  # a second warning would be an error
        assert not calls_a_kernel(op, "cuda")


def test_jaxs_own_functions_warn_too(without_the_cuda_module):
    without_the_cuda_module("a GPU")
    with jb.override_jax_linalg(), pytest.warns(RuntimeWarning, match="it was not built"):
        f = jax.jit(lambda a: jax.numpy.linalg.cholesky(a))
        f.trace(np.eye(3, dtype="float32")).lower(lowering_platforms=("cuda",))


def test_no_warning_where_no_kernel_is_missed(without_the_cuda_module):
    """A warning would be an error."""
    without_the_cuda_module("a GPU")
    op = ops.ONE_EACH[0]
    assert calls_a_kernel(op, "cpu")
    assert not calls_a_kernel(op, "cuda", n=513)
    without_the_cuda_module()
    assert calls_a_kernel(op, "cuda")


def test_import_without_a_gpu_uses_the_cpu():
    program = (
        "import jax, jax_batched as jb, numpy as np\n"
        "print(jax.default_backend(), float(jb.cholesky(np.eye(2, dtype='f') * 4)[1, 1]))"
    )
    assert run("-c", program, JAX_PLATFORMS="cpu").split() == ["cpu", "2.0"]


def test_import_does_not_start_a_backend():
    """Importing must leave the choice of devices and flags to the program."""
    program = (
        "import jax, jax_batched\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "print(len(jax.devices('cpu')))"
    )
    assert run("-c", program, JAX_PLATFORMS="cpu", XLA_FLAGS="").strip() == "3"


def test_import_warns_about_nothing():
    assert run("-W", "error", "-c", "import jax_batched", JAX_PLATFORMS="cpu") == ""


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", jb.__version__)


def test_the_cpu_serves_calls_on_any_machine():
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = SOLVE_POS[0].operands("float64", batch=(3,), n=4)
        x = jb.solve(a, b, assume_a="pos")
        assert {device.platform for device in x.devices()} == {"cpu"}
        SOLVE_POS[0].check((a, b), np.asarray(x))
