"""jax.export: every operation, for the CPU, for CUDA without a GPU, for both, any batch."""

import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _ffi

HERE = "cuda" if jax.default_backend() == "gpu" else "cpu"
PLATFORMS = (("cpu",), ("cuda",), ("cpu", "cuda"))
STORED = Path(__file__).parent / "exported"
# JAX takes a symbolic size for at least 1: a batch that may be empty is b - 1.
BATCH = "b - 1"
BATCHES = (0, 1, 8)
SIZES = range(1, 513)
ON_CUDA = [op for op in ops.ONE_EACH if op.on_cuda]


def export(f, *shapes, platforms=(HERE,), dtype="float32", checks=None, batch=BATCH):
    """f exported for operands with a symbolic batch dimension."""
    scope = jax.export.SymbolicScope()
    symbolic = [
        jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"{batch}, {n}, {k}", scope=scope), dtype)
        for n, k in shapes
    ]
    disabled = jb.export_disabled_checks() if checks is None else checks
    exporting = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=disabled)
    return exporting(*symbolic)


def check(op, operands, x):
    """x has the right shape and is right."""
    assert x.shape == op.reference(*operands).shape
    if x.size:
        op.check(operands, x)


def core_shapes(op, n=3, nrhs=2):
    return [x.shape for x in op.operands("float32", n=n, nrhs=nrhs)]


def targets(exported):
    return set(re.findall(r"@jax_batched\.(\w+)\.v1", exported.mlir_module()))


@pytest.mark.parametrize("platforms", PLATFORMS, ids="-".join)
@pytest.mark.parametrize("op", ops.REDUCED, ids=ops.ids)
def test_every_operation_for_every_platform(op, platforms):
    # JAX's LU path gathers, which needs a batch that is not empty.
    gathers = "cuda" in platforms and not op.on_cuda
    exported = export(op, *core_shapes(op), platforms=platforms, batch="b" if gathers else BATCH)
    assert exported.platforms == platforms
    called = {platform: {op.operation} for platform in platforms}
    if "cuda" in platforms:
        called["cuda"] = op.kernels_called("float32", 3, 2)
    if "cuda" in platforms and not op.on_cuda:  # `lax` there, which other kernels may serve in part
        assert (op.operation in targets(exported)) == ("cpu" in platforms)
    else:
        assert targets(exported) == set().union(*called.values())
    if HERE in platforms:
        for batch in (1, 8) if gathers else BATCHES:
            operands = op.operands("float32", batch=(batch,), n=3, nrhs=2)
            check(op, operands, exported.call(*operands))


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_gradients(op):
    def gradient(*xs):
        return jax.grad(lambda *xs: jnp.sum(jnp.sin(op(*xs))), tuple(range(len(xs))))(*xs)

    exported = export(gradient, *core_shapes(op), dtype="float64")
    for batch in BATCHES:
        operands = op.operands("float64", batch=(batch,), n=3, nrhs=2)
        for ours, theirs in zip(exported.call(*operands), gradient(*operands), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_shared_operand(op):
    """One factor for a batch of unknown size, which may be empty; and the other way round."""
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    shared_a = export(lambda x: op(a[0], x), b.shape[1:], dtype="float64")
    shared_b = export(lambda x: op(x, b[0]), a.shape[1:], dtype="float64")
    assert targets(shared_a) == targets(shared_b) == {op.operation}
    for batch in BATCHES:
        x, y = shared_a.call(b[:batch]), shared_b.call(a[:batch])
        check(op, (np.broadcast_to(a[0], (batch, 3, 3)), b[:batch]), x)
        check(op, (a[:batch], np.broadcast_to(b[0], (batch, *b.shape[1:]))), y)


def test_a_shared_factor_and_a_batch_that_is_not_empty_is_one_solve():
    a, b = ops.BY_NAME["cho_solve-lower"].operands("float64", batch=(8,), n=3, nrhs=2)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3, 2"), "float64")
    exported = jax.export.export(
        jax.jit(lambda x: jb.cho_solve((a[0], True), x)),
        disabled_checks=jb.export_disabled_checks(),
    )(shape)
    assert "(tensor<3x3xf64>, tensor<3x?xf64>" in exported.mlir_module()
    np.testing.assert_allclose(exported.call(b), jb.cho_solve((a[0], True), b), rtol=1e-12)


def test_symbolic_right_hand_sides():
    """Their number may be known to be positive, or not: then JAX's own routines serve none."""
    op = ops.BY_NAME["solve_pos-lower"]
    for spec, counts in (("k", (1, 4)), ("k - 1", (0, 4))):
        n, k = jax.export.symbolic_shape(f"3, {spec}")
        shapes = [jax.ShapeDtypeStruct((2, 3, 3), "float32")]
        shapes += [jax.ShapeDtypeStruct((2, n, k), "float32")]
        exported = jax.export.export(jax.jit(op), disabled_checks=jb.export_disabled_checks())(
            *shapes
        )
        assert targets(exported) == ({"solve_pos"} if spec == "k" else set())
        for count in counts:
            operands = op.operands("float32", batch=(2,), n=3, nrhs=count)
            check(op, operands, exported.call(*operands))


LOADER = """
import json, sys
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
if sys.argv[2] == "import":
    import jax_batched
results, errors = {}, {}
for name, count in json.load(open(sys.argv[1] + "/cases.json")).items():
    exported = jax.export.deserialize(bytearray(open(f"{sys.argv[1]}/{name}.bin", "rb").read()))
    inputs = np.load(f"{sys.argv[1]}/{name}.npz")
    for batch in (0, 1, 8):
        try:
            x = exported.call(*(inputs[str(i)][:batch] for i in range(count)))
            results[f"{name}/{batch}"] = np.asarray(x)
        except Exception as error:
            errors[f"{name}/{batch}"] = f"{type(error).__name__}: {error}"
np.savez(sys.argv[1] + "/results.npz", **results)
json.dump(errors, open(sys.argv[1] + "/errors.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every operation, serialised, with operands."""
    pytest.importorskip("flatbuffers")
    path = tmp_path_factory.mktemp("exported")
    cases = {}
    for op in ops.WITH_KERNELS:
        operands = op.operands("float64", batch=(8,), n=5, nrhs=2)
        exported = export(op, *(x.shape[1:] for x in operands), dtype="float64")
        (path / f"{op.name}.bin").write_bytes(exported.serialize())
        np.savez(path / f"{op.name}.npz", **{str(i): x for i, x in enumerate(operands)})
        cases[op.name] = len(operands)
    (path / "cases.json").write_text(json.dumps(cases))
    return path


def load(folder, how):
    """Results and errors of a fresh process that loads and calls what the folder holds."""
    subprocess.run(
        [sys.executable, "-c", LOADER, str(folder), how], check=True, cwd=tempfile.gettempdir()
    )
    return np.load(folder / "results.npz"), json.loads((folder / "errors.json").read_text())


def test_a_fresh_process_loads_and_calls(folder):
    results, errors = load(folder, "import")
    assert errors == {}
    for op in ops.WITH_KERNELS:
        for batch in BATCHES:
            operands = op.operands("float64", batch=(8,), n=5, nrhs=2)
            check(op, [x[:batch] for x in operands], results[f"{op.name}/{batch}"])


def test_a_process_without_the_package_is_told_its_name(folder):
    _, errors = load(folder, "do not import")
    for op in ops.WITH_KERNELS:
        for batch in (1, 8):  # JAX runs nothing for an empty result
            message = errors[f"{op.name}/{batch}"]
            assert f"No FFI handler registered for jax_batched.{op.operation}.v1" in message


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_the_disabled_checks_are_needed_and_enough(op):
    with pytest.raises(ValueError, match=f"jax_batched.{op.operation}.v1"):
        export(op, *core_shapes(op), checks=())
    target = f"jax_batched.{op.operation}.v1"
    others = [c for c in jb.export_disabled_checks() if target not in str(c)]
    assert len(others) == len(jb.export_disabled_checks()) - 1
    with pytest.raises(ValueError, match=f"jax_batched.{op.operation}.v1"):
        export(op, *core_shapes(op), checks=others)


@pytest.mark.parametrize("stored", ops.STORED)
def test_what_takes_16_bit_elements_on_cuda_are_the_kernels_that_do(stored):
    """At the edges of the rows' own ranges, and with more than one right-hand side."""
    short = {"float16": "xf16>", "bfloat16": "xbf16>"}[stored]
    for op in ON_CUDA:
        shapes = [(n, 1) for n in {8, op.stored_max_n, op.stored_max_n + 1} - {0}]
        for n, nrhs in [*shapes, *([(8, 2), (8, "k")] if op.takes_b else [])]:
            rhs = (n, nrhs) if op.left_side else (nrhs, n)
            shapes = [(n, n), rhs] if op.takes_b else [(n, n)]
            text = export(op, *shapes, platforms=("cuda",), dtype=stored).mlir_module()
            calls = [line for line in text.splitlines() if "@jax_batched." in line]
            as_stored = n <= op.stored_max_n and nrhs == 1
            assert calls and all((short in line) == as_stored for line in calls), (op.name, n, nrhs)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ON_CUDA, ids=ops.ids)
def test_the_form_of_a_call_for_cuda_is_that_of_its_kernels(op, dtype):
    """A machine without the CUDA module knows what they serve: as the rows say, size by size."""
    many = (1, 2, 16, 17) if op.takes_b else (1,)
    forms = {nrhs: [frozenset(op.kernels_called(dtype, n, nrhs)) for n in SIZES] for nrhs in many}
    edges = {
        SIZES[i + step]
        for form in forms.values()
        for i, (one, next_one) in enumerate(itertools.pairwise(form))
        if one != next_one
        for step in (0, 1)
    }
    for n, nrhs in itertools.product(sorted({1, *edges}), many):
        shapes = [(n, n), (n, nrhs) if op.left_side else (nrhs, n)][: 1 + op.takes_b]
        exported = export(op, *shapes, platforms=("cuda",), dtype=dtype)
        assert targets(exported) == op.kernels_called(dtype, n, nrhs), (n, nrhs)


@pytest.mark.parametrize("op", ON_CUDA, ids=ops.ids)
def test_a_gpu_without_the_cuda_module_runs_lax(op, monkeypatch):
    monkeypatch.setitem(_ffi._loaded, "cuda", (None, "not built"))
    monkeypatch.setattr(_ffi, "devices", lambda platform: ("a GPU",))
    assert targets(export(op, *core_shapes(op), platforms=("cuda",))) == set()


def test_a_program_that_calls_jaxs_own_functions():
    (a,) = ops.BY_NAME["cholesky-lower-mean"].operands("float64", batch=(8,), n=5)
    with jb.override_jax_linalg():
        exported = export(lambda a: jnp.linalg.cholesky(a), (5, 5), dtype="float64")
    assert targets(exported) == {"cholesky"}
    for batch in BATCHES:
        ours = exported.call(a[:batch])
        np.testing.assert_allclose(ours, np.linalg.cholesky(a[:batch]), rtol=1e-12)


def test_sharded_over_devices():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices("cpu"))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    op = ops.BY_NAME["solve_pos-lower"]
    operands = op.operands("float64", batch=(16,), n=3, nrhs=2)
    sharded = [jax.device_put(x, sharding) for x in operands]
    f = jax.jit(op, in_shardings=sharding, out_shardings=sharding)
    checks = jb.export_disabled_checks()
    exported = jax.export.export(f, platforms=("cpu",), disabled_checks=checks)(*sharded)
    assert exported.nr_devices == 8
    x = jax.jit(exported.call, in_shardings=sharding)(*sharded)
    assert x.sharding.is_equivalent_to(sharding, 3)
    op.check(operands, x)


# What earlier versions exported: see exported/README.md.


class ExpiredError(Exception):
    """JAX reads programs of the last six months; later it may refuse them."""


def stored_programs():
    return sorted(STORED.glob("*/*.jaxexport"))


@functools.cache
def stored_program(file):
    """A stored program, or ExpiredError where this JAX refuses its version of the format."""
    try:
        return jax.export.deserialize(bytearray(file.read_bytes()))
    except ValueError as error:
        if not re.search(r"window|(calling convention|serialization) version", str(error)):
            raise
        raise ExpiredError(
            f"jax {jax.__version__} no longer reads {file.parent.name}/{file.name}; store programs "
            "of the present version with `python tests/exported/make.py`, under the oldest jax"
        ) from error


@pytest.mark.parametrize("file", stored_programs(), ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_programs_of_earlier_versions_run(file):
    pytest.importorskip("flatbuffers")
    try:
        exported = stored_program(file)
    except ExpiredError as expired:
        pytest.skip(str(expired))
    assert exported.platforms == ("cpu", "cuda")
    name, dtype = file.stem.rsplit("-", 1)
    gradient = name.startswith("gradient-")
    op = ops.BY_NAME["inv" if name in ops.PROGRAMS else name.removeprefix("gradient-")]
    call = ops.gradient(op) if gradient else op.with_info if op.can_fail else op
    call = ops.PROGRAMS.get(name, call)
    for batch in BATCHES:
        operands = op.operands(dtype, batch=(batch,), n=6, nrhs=3)
        ours = exported.call(*operands)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(call(*operands)), strict=True):
            # Residues of rounding, as a residual's norm, depend on the order of sums.
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=100 * float(jnp.finfo(dtype).eps))
        if name in ops.BY_NAME:
            check(op, operands, jax.tree.leaves(ours)[0])


def test_every_target_has_a_stored_program_that_this_jax_reads():
    pytest.importorskip("flatbuffers")
    found, expired = set(), []
    for file in stored_programs():
        try:
            found |= targets(stored_program(file))
        except ExpiredError as error:
            expired.append(str(error))
    on_both = {op for op in _ffi.OPERATIONS if _ffi.max_n("cuda", op, "float32")}
    assert found >= on_both, expired[:1]


def test_an_expired_program_says_what_to_do(monkeypatch):
    def refuse(blob):
        raise ValueError("Exported seems to be older than the 6-month compatibility window")

    monkeypatch.setattr(jax.export, "deserialize", refuse)
    with pytest.raises(ExpiredError, match=r"no longer reads 0.1.0/.*exported/make\.py"):
        stored_program.__wrapped__(stored_programs()[0])


def test_a_program_that_is_broken_has_not_expired(tmp_path):
    pytest.importorskip("flatbuffers")
    file = tmp_path / "broken.jaxexport"
    file.write_bytes(b"no program at all")
    with pytest.raises(Exception) as error:
        stored_program.__wrapped__(file)
    assert not isinstance(error.value, ExpiredError)
