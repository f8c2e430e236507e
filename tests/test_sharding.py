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
    operands = ops.SOLVE_POS[1].operands("float64", batch=(4, 6), n=3, nrhs=2)
    where = mesh(shape=(4, 2), names=("x", "y"))
    sharded = on(where, *operands, spec=P("x", "y"))
    assert not COLLECTIVES.search(compiled_text(ops.SOLVE_POS[1], *sharded))
    x = jax.jit(ops.SOLVE_POS[1])(*sharded)
    assert x.sharding.is_equivalent_to(sharded[0].sharding, 4)
    ops.SOLVE_POS[1].check(operands, x)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_replicated_factor_with_sharded_right_hand_sides(op):
    """Batches broadcast: the values are right wherever the operands are."""
    a, b = op.operands("float64", batch=(8,), n=3, nrhs=2)
    where = mesh()
    (shared,) = on(where, a[0], spec=P())
    (sharded,) = on(where, b)
    for f in (op, jax.vmap(op, (None, 0))):
        x = jax.jit(f)(shared, sharded)
        op.check((np.broadcast_to(a[0], a.shape), b), x)


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


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_gradient_of_a_replicated_operand_is_summed_over_the_devices(op, shared):
    operands = list(op.operands("float64", batch=(8,), n=3, nrhs=2))
    operands[shared] = operands[shared][0]
    specs = [P("x"), P("x")]
    specs[shared] = P()

    def local(a, b):
        return jnp.sum(jnp.sin(op(a, b)), axis=(-2, -1))

    mapped = jax.shard_map(
        local, mesh=mesh(), in_specs=tuple(specs), out_specs=P("x"), check_vma=True
    )
    ours = jax.jit(jax.grad(lambda *xs: mapped(*xs).sum(), (0, 1)))(*operands)
    theirs = jax.grad(lambda *xs: local(*xs).sum(), (0, 1))(*operands)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
@pytest.mark.parametrize("shared", (0, 1))
def test_wrong_output_specification_is_refused(op, shared):
    """One operand varies over the devices, so the result does, whichever it is."""
    operands = list(op.operands("float64", batch=(8,), n=3, nrhs=2))
    operands[shared] = operands[shared][0]
    specs = [P("x"), P("x")]
    specs[shared] = P()
    f = jax.shard_map(op, mesh=mesh(), in_specs=tuple(specs), out_specs=P(), check_vma=True)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(f)(*operands)


def test_info_is_sharded_as_the_batch():
    a = np.stack([np.eye(3), -np.eye(3)] * 4)
    (sharded,) = on(mesh(), a)
    factor, info = jax.jit(functools.partial(jb.cholesky, return_info=True))(sharded)
    assert info.sharding.is_equivalent_to(NamedSharding(mesh(), P("x")), 1)
    np.testing.assert_array_equal(info, [0, 1] * 4)
    assert np.isnan(np.asarray(factor)[1::2]).any(axis=(-2, -1)).all()
