"""Batches spread over 8 CPU devices: automatic and explicit meshes, and shard_map."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_batched as jb
from jax_batched import _ffi

SOLVE_POS = ops.of("solve_pos")

COLLECTIVES = re.compile(
    r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(-start)?\("
)


def mesh(kind=AxisType.Auto, shape=(8,), names=("x",)):
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def on(where, *arrays, spec=None):
    """The arrays on a mesh, their first dimension over its axis x unless spec says otherwise."""
    sharding = NamedSharding(where, P("x") if spec is None else spec)
    return tuple(jax.device_put(x, sharding) for x in arrays)


def compiled_text(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def squared(op):
    """A real function of the operands."""
    return lambda *operands: jnp.sum(jnp.abs(op(*operands)) ** 2, axis=(-2, -1))


def gradients(op):
    """Gradients per matrix, without the sum over the batch that would need an all-reduce."""

    def pulled_back(*xs):
        y, pullback = jax.vjp(squared(op), *xs)
        return pullback(jnp.ones_like(y))

    return pulled_back


@pytest.mark.parametrize("op", ops.REDUCED, ids=ops.ids)
def test_a_sharded_batch_stays_where_it_is(op):
    operands = op.operands("float64", batch=(8,), n=3, nrhs=2)
    sharded = on(mesh(), *operands)
    assert not COLLECTIVES.search(compiled_text(op, *sharded))
    x = jax.jit(op)(*sharded)
    assert x.sharding.is_equivalent_to(sharded[0].sharding, 3)
    op.check(operands, x)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_gradients_of_a_sharded_batch_stay_where_they_are(op):
    operands = op.operands("float64", batch=(8,), n=3, nrhs=2)
    sharded = on(mesh(), *operands)
    f = gradients(op)
    assert not COLLECTIVES.search(compiled_text(f, *sharded))
    for ours, theirs in zip(jax.jit(f)(*sharded), jax.jit(f)(*operands), strict=True):
        assert ours.sharding.is_equivalent_to(sharded[0].sharding, 3)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_each_device_sees_its_part(op):
    operands = op.operands("float32", batch=(8,), n=3, nrhs=2)
    sharded = on(mesh(shape=(4,)), *operands)
    text = compiled_text(op, *sharded)
    call = next(line for line in text.splitlines() if f"jax_batched.{op.operation}.v1" in line)
    assert "f32[2,3," in call
    assert "f32[8," not in call
    x = jax.jit(op)(*sharded)
    assert {shard.data.shape[0] for shard in x.addressable_shards} == {2}


def test_two_batch_dimensions_over_two_axes():
    operands = SOLVE_POS[1].operands("float64", batch=(4, 6), n=3, nrhs=2)
    where = mesh(shape=(4, 2), names=("x", "y"))
    sharded = on(where, *operands, spec=P("x", "y"))
    assert not COLLECTIVES.search(compiled_text(SOLVE_POS[1], *sharded))
    x = jax.jit(SOLVE_POS[1])(*sharded)
    assert x.sharding.is_equivalent_to(sharded[0].sharding, 4)
    SOLVE_POS[1].check(operands, x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_replicated_factor_with_sharded_right_hand_sides(op):
    """Their axis becomes columns of one solve, of which each device solves its own."""
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh()
    (shared,) = on(where, a[0], spec=P())
    (sharded,) = on(where, b)
    for f in (op, jax.vmap(op, (None, 0))):
        text = compiled_text(f, shared, sharded)
        assert not COLLECTIVES.search(text)
        assert f"jax_batched.{op.operation}.v1" in text
        x = jax.jit(f)(shared, sharded)
        assert x.sharding.is_equivalent_to(sharded.sharding, 3)
        op.check((np.broadcast_to(a[0], a.shape), b), x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_folded_axis_is_one_solve_on_each_device(op):
    """The factor is not copied for each of the 4 systems of a device."""
    a, b = op.operands("float64", batch=(16,), n=3, nrhs=2)
    where = mesh(shape=(4,))
    (shared,) = on(where, a[0], spec=P())
    (sharded,) = on(where, b)
    text = compiled_text(jax.vmap(op, (None, 0)), shared, sharded)
    call = next(line for line in text.splitlines() if f"jax_batched.{op.operation}.v1" in line)
    assert ("f64[3,8]" if op.left_side else "f64[8,3]") in call
    assert "f64[3,3]" in call


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_gradients_with_a_replicated_factor(op):
    """That of the right-hand sides is local; that of the factor is the sum over the devices."""
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh()
    (shared,) = on(where, a[0], spec=P())
    (sharded,) = on(where, b)

    def pulled_back(a, b):
        y, pullback = jax.vjp(squared(jax.vmap(op, (None, 0))), a, b)
        return pullback(jnp.ones_like(y))

    def of_b(a, b):
        return pulled_back(a, b)[1]

    assert not COLLECTIVES.search(compiled_text(of_b, shared, sharded))
    found = {
        match[1] for match in COLLECTIVES.finditer(compiled_text(pulled_back, shared, sharded))
    }
    assert found == {"all-reduce"}
    theirs = jax.jit(pulled_back)(a[0], b)
    for ours, expected in zip(jax.jit(pulled_back)(shared, sharded), theirs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


def column_spec(op, axis, *batch):
    """The sharding of right-hand sides whose columns are spread over a mesh axis."""
    return P(*batch, None, axis) if op.left_side else P(*batch, axis, None)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_right_hand_sides_sharded_along_their_columns(op, kind):
    """Each matrix whole on every device, or spread over another axis of the mesh."""
    a, b = op.operands("float64", batch=(4,), n=3, nrhs=6)
    where = mesh(kind, shape=(4, 2), names=("x", "y"))
    expected = jax.jit(gradients(op))(a, b)
    with jax.set_mesh(where):
        for batch in (None, "x"):
            (factor,) = on(where, a, spec=P(batch))
            (columns,) = on(where, b, spec=column_spec(op, "y", batch))
            assert not COLLECTIVES.search(compiled_text(op, factor, columns))
            x = jax.jit(op)(factor, columns)
            assert x.sharding.is_equivalent_to(columns.sharding, 3)
            op.check((a, b), x)

            def of_b(a, b):
                return jax.vjp(lambda b: jnp.abs(op(a, b)) ** 2, b)[1](jnp.ones_like(b))[0]

            assert not COLLECTIVES.search(compiled_text(of_b, factor, columns))
            derived = jax.jit(gradients(op))(factor, columns)
            for ours, theirs in zip(derived, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_batches_of_both_operands_over_two_axes(op):
    """Every matrix with every right-hand side, over a mesh of devices."""
    a, b = op.operands("float64", batch=(4,), n=3, nrhs=2)
    where = mesh(shape=(4, 2), names=("x", "y"))
    (factors,) = on(where, a, spec=P("x"))
    (columns,) = on(where, b, spec=P("y"))
    f = jax.vmap(jax.vmap(op, (None, 0)), (0, None))
    assert not COLLECTIVES.search(compiled_text(f, factors, columns))
    x = jax.jit(f)(factors, columns)
    assert x.sharding.is_equivalent_to(NamedSharding(where, P("x", "y")), 4)
    full = [np.broadcast_to(y, (4, *y.shape)) for y in (a, b)]
    op.check((np.swapaxes(full[0], 0, 1), full[1]), x)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_a_sharded_matrix_axis_is_gathered(op):
    """The result is right; Explicit meshes refuse it."""
    operands = op.operands("float64", batch=(2,), n=8, nrhs=2)
    for spec in (P(None, "x"), P(None, None, "x")):
        (a,) = on(mesh(), operands[0], spec=spec)
        op.check(operands, jax.jit(op)(a, *operands[1:]))
        where = mesh(AxisType.Explicit)
        with jax.set_mesh(where):
            (a,) = on(where, operands[0], spec=spec)
            b = on(where, *operands[1:], spec=P())
            with pytest.raises(ValueError, match=r"must not be sharded"):
                op(a, *b)


def test_a_batch_that_the_devices_do_not_divide():
    op = ops.BY_NAME["cho_solve-lower"]
    a, b = op.operands("float64", batch=(6,), n=3, nrhs=3)
    where = mesh(shape=(4,))

    def f(a, b):
        b = jax.lax.with_sharding_constraint(b, NamedSharding(where, P("x")))
        return op(a, b), op(a[0], b), jax.vmap(op, (None, 0))(a[0], b)

    x, *shared = jax.jit(f)(*on(where, a, b, spec=P()))
    op.check((a, b), x)
    for y in shared:
        op.check((np.broadcast_to(a[0], a.shape), b), y)


@pytest.mark.parametrize("op", ops.REDUCED, ids=ops.ids)
def test_results_are_those_of_one_device(op):
    """Bit for bit, for a batch; JAX's LU alone may round otherwise."""
    operands = op.operands("float32", batch=(16,), n=5, nrhs=2)
    one = jax.device_put(operands, jax.devices("cpu")[0])
    ours, alone = (jax.jit(op)(*xs) for xs in (on(mesh(), *operands), one))
    if op.kernels:
        assert ops.same_bits(ours, alone)
    np.testing.assert_allclose(ours, alone, rtol=1e-4)


def test_operands_that_are_replicated_in_a_program_of_many_devices():
    op = ops.BY_NAME["solve_pos-lower"]
    operands = op.operands("float64", batch=(3,), n=3, nrhs=2)
    replicated = on(mesh(), *operands, spec=P())
    assert not COLLECTIVES.search(compiled_text(op, *replicated))
    op.check(operands, jax.jit(op)(*replicated))


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_vmap_over_a_sharded_axis(op):
    operands = op.operands("float64", batch=(8,), n=3, nrhs=2)
    sharded = on(mesh(), *operands)
    f = jax.vmap(op, spmd_axis_name="x")
    assert not COLLECTIVES.search(compiled_text(f, *sharded))
    op.check(operands, jax.jit(f)(*sharded))


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_explicit_mesh(op):
    """Shardings are part of the types; eager, compiled and differentiated."""
    operands = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        sharded = on(where, *operands)
        for f in (op, jax.jit(op), jax.vmap(op), jax.jit(jax.vmap(op))):
            x = f(*sharded)
            assert jax.typeof(x).sharding.spec == P("x", None, None)
            op.check(operands, x)
        assert not COLLECTIVES.search(compiled_text(op, *sharded))
        f = gradients(op)
        assert not COLLECTIVES.search(compiled_text(f, *sharded))
        derived = jax.jit(f)(*sharded)
    for ours, theirs in zip(derived, jax.jit(f)(*operands), strict=True):
        assert ours.sharding.spec[0] == "x"
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_explicit_mesh_with_a_replicated_factor(op):
    """A sharded batch dimension is not folded into the columns."""
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        (shared,) = on(where, a[0], spec=P())
        (sharded,) = on(where, b)
        for f in (op, jax.vmap(op, (None, 0))):
            x = jax.jit(f)(shared, sharded)
            assert jax.typeof(x).sharding.spec == P("x", None, None)
            op.check((np.broadcast_to(a[0], a.shape), b), x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_explicit_mesh_with_replicated_right_hand_sides(op):
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        (sharded,) = on(where, a)
        (shared,) = on(where, b[0], spec=P())
        for f in (op, jax.vmap(op, (0, None))):
            x = jax.jit(f)(sharded, shared)
            assert jax.typeof(x).sharding.spec == P("x", None, None)
            op.check((a, np.broadcast_to(b[0], b.shape)), x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_explicit_mesh_gradients_with_a_replicated_operand(op, shared):
    operands = list(op.operands("float64", batch=(8,), n=3, nrhs=2))
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        sharded = list(on(where, *operands))
        operands[shared] = operands[shared][0]
        (sharded[shared],) = on(where, operands[shared], spec=P())
        f = gradients(op)
        ours = jax.jit(f)(*sharded)
    for x, y, operand in zip(ours, jax.jit(f)(*operands), sharded, strict=True):
        assert x.sharding.is_equivalent_to(operand.sharding, x.ndim)
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("op", SOLVE_POS, ids=ops.ids)
def test_a_solve_that_is_made_of_two_kernels(op, kind, monkeypatch):
    one_kernel = _ffi.is_one_kernel
    monkeypatch.setattr(
        _ffi, "is_one_kernel", lambda *call: call[1] != "solve_pos" and one_kernel(*call)
    )
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh(kind)
    with jax.set_mesh(where):
        (shared,) = on(where, a[0], spec=P())
        factors, columns = on(where, a, b)
        for x, expected in ((factors, a), (shared, np.broadcast_to(a[0], a.shape))):
            f = jax.jit(lambda *xs: op(*xs))
            text = f.lower(x, columns).compile().as_text()
            assert not COLLECTIVES.search(text)
            assert "jax_batched.cho_solve.v1" in text and "solve_pos" not in text
            op.check((expected, b), f(x, columns))


def test_one_mesh_axis_for_two_dimensions_is_refused():
    op = ops.BY_NAME["cho_solve-lower"]
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=8)
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        (a,) = on(where, a)
        (b,) = on(where, b, spec=P(None, None, "x"))
        with pytest.raises(ValueError, match=r"cho_solve: .* two dimensions of the result over x"):
            op(a, b)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_explicit_mesh_beyond_the_kernels(op, shared, monkeypatch):
    """The lax path keeps the shardings too, also where one operand is replicated."""
    monkeypatch.setattr(_ffi, "max_n", lambda platform, operation, dtype: 2)
    operands = list(op.operands("float64", batch=(8,), n=3, nrhs=2))
    where = mesh(AxisType.Explicit)
    with jax.set_mesh(where):
        sharded = list(on(where, *operands))
        if len(operands) == 2:
            operands[shared] = operands[shared][0]
            (sharded[shared],) = on(where, operands[shared], spec=P())
            operands[shared] = np.broadcast_to(operands[shared], (8, *operands[shared].shape))
        f = jax.jit(lambda *xs: op(*xs))
        assert "jax_batched." not in f.lower(*sharded).as_text()
        x = f(*sharded)
        assert x.sharding.spec[0] == "x"
        op.check(operands, x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_sharded_columns_beyond_the_kernels(op, monkeypatch):
    monkeypatch.setattr(_ffi, "max_n", lambda platform, operation, dtype: 2)
    a, b = op.operands("float64", batch=(4,), n=3, nrhs=8)
    for kind in (AxisType.Auto, AxisType.Explicit):
        where = mesh(kind)
        with jax.set_mesh(where):
            (factor,) = on(where, a, spec=P())
            (columns,) = on(where, b, spec=column_spec(op, "x", None))
            op.check((a, b), jax.jit(lambda *xs: op(*xs))(factor, columns))


def test_explicit_sharding_inside_a_matrix_is_refused():
    where = mesh(AxisType.Explicit, shape=(2,))
    with jax.set_mesh(where):
        (a,) = on(where, np.eye(4), spec=P("x", None))
        with pytest.raises(ValueError, match=r"cholesky: .*must not be sharded"):
            jb.cholesky(a, symmetrize_input=False)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_shard_map(op):
    operands = op.operands("float64", batch=(8,), n=3, nrhs=2)
    f = jax.shard_map(
        op, mesh=mesh(), in_specs=(P("x"),) * len(operands), out_specs=P("x"), check_vma=True
    )
    x = jax.jit(f)(*operands)
    op.check(operands, x)
    assert not COLLECTIVES.search(compiled_text(f, *operands))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit, "shard_map"))
def test_many_rows(kind):
    """QR and least squares by blocks of rows, and a gradient."""
    a = np.random.default_rng(0).standard_normal((8, 600, 20))
    functions = (
        lambda a: jb.qr(a),
        lambda a: jb.qr(a, "r"),
        lambda a: jb.lstsq(a, a[..., :2] + 1).x,
        lambda a: jax.grad(lambda a: jnp.sum(jb.qr(a, "r") ** 2))(a),
    )
    for f in functions:
        if kind == "shard_map":
            sharded = jax.shard_map(f, mesh=mesh(), in_specs=P("x"), out_specs=P("x"))
            results = jax.jit(sharded)(a)
        else:
            with jax.set_mesh(mesh(kind)):
                results = jax.jit(f)(*on(mesh(kind), a))
        for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(f(a)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def test_shard_map_of_a_scan():
    """The carry varies over the mesh axis at its start and at its end."""
    (a,) = ops.BY_NAME["cholesky-lower-mean"].operands("float64", batch=(8,), n=3)

    def loop(a):
        def body(c, _):
            return jb.cholesky(c) + jnp.eye(3), None

        return jax.lax.scan(body, a, None, length=2)[0]

    f = jax.shard_map(loop, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=True)
    result = jax.jit(f)(a)
    assert np.isfinite(result).all()
    np.testing.assert_allclose(result, loop(a), rtol=1e-12)


def one_replicated(op, shared):
    """Operands of 8 systems, one of them the same for all, and their specifications."""
    operands = list(op.operands("float64", batch=(8,), n=3, nrhs=2))
    operands[shared] = operands[shared][0]
    specs = [P("x"), P("x")]
    specs[shared] = P()
    return operands, tuple(specs)


def check_mapped_gradient(local, operands, specs):
    """Compares the gradient through shard_map with that of the whole."""
    mapped = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=P("x"), check_vma=True)
    ours = jax.jit(jax.grad(lambda *xs: mapped(*xs).sum(), (0, 1)))(*operands)
    theirs = jax.grad(lambda *xs: local(*xs).sum(), (0, 1))(*operands)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_gradient_of_a_replicated_operand_is_summed_over_the_devices(op, shared):
    operands, specs = one_replicated(op, shared)

    def local(a, b):
        return jnp.sum(jnp.sin(op(a, b)), axis=(-2, -1))

    check_mapped_gradient(local, operands, specs)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_wrong_output_specification_is_refused(op, shared):
    """One operand varies over the devices, so the result does, whichever it is."""
    operands, specs = one_replicated(op, shared)
    f = jax.shard_map(op, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=True)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(f)(*operands)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_shard_map_of_a_scan_with_a_replicated_operand(op, shared):
    """The gradient of the replicated operand is the sum over the devices and the steps."""
    operands, specs = one_replicated(op, shared)

    def local(a, b):
        def body(total, _):
            return total + jnp.sum(jnp.sin(op(a, b)), axis=(-2, -1)), None

        start = jnp.zeros(b.shape[0] if shared == 0 else a.shape[0])
        varying = jax.typeof(b if shared == 0 else a).manual_axis_type.varying
        if varying:
            start = jax.lax.pcast(start, tuple(varying), to="varying")
        return jax.lax.scan(body, start, None, length=3)[0]

    check_mapped_gradient(local, operands, specs)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_shard_map_over_one_of_two_axes(op):
    """The other axis is left to the partitioner."""
    operands = op.operands("float64", batch=(4, 2), n=3, nrhs=2)
    where = mesh(shape=(4, 2), names=("x", "y"))
    f = jax.shard_map(
        op,
        mesh=where,
        in_specs=(P("x"),) * len(operands),
        out_specs=P("x"),
        axis_names={"x"},
        check_vma=True,
    )
    sharded = on(where, *operands, spec=P("x", "y"))
    assert not COLLECTIVES.search(compiled_text(f, *sharded))
    op.check(operands, jax.jit(f)(*sharded))


def test_info_is_sharded_as_the_batch():
    a = np.stack([np.eye(3), -np.eye(3)] * 4)
    (sharded,) = on(mesh(), a)
    factor, info = jax.jit(functools.partial(jb.cholesky, return_info=True))(sharded)
    assert info.sharding.is_equivalent_to(NamedSharding(mesh(), P("x")), 1)
    np.testing.assert_array_equal(info, [0, 1] * 4)
    assert np.isnan(np.asarray(factor)[1::2]).any(axis=(-2, -1)).all()
