"""`where=`: the entries of a batch that are computed, with every kernel and path."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from jax.sharding import PartitionSpec

import jax_batched as jb
from jax_batched._matrices import general

BATCH = 67
# Around the edges of the kernels; every second one has several right-hand sides.
SIZES = (1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 97, 130, 200)
NRHS = (1, 3)


def masks(batch=BATCH):
    """Runs of neighbours, single ones, none, all."""
    rng = np.random.default_rng(0)
    runs = np.arange(batch) // 9 % 2 == 0
    one = np.arange(batch) == batch - 1
    return [rng.random(batch) < 0.5, runs, one, np.zeros(batch, bool), np.ones(batch, bool)]


def spoiled(operands, mask):
    """NaN in what must not count."""
    return tuple(np.where(mask[:, None, None], x, np.array(np.nan, x.dtype)) for x in operands)


def with_mask(op):
    """The row's function of operands and a mask, with info if it has some."""
    options = {**op.options, **({"return_info": True} if op.has_info else {})}
    return lambda *xs: op.function(*xs[:-1], **options, where=xs[-1])


def plain(op):
    return op.with_info if op.has_info else op


def check_masked(result, expected, mask, exactly):
    """Entries as without a mask; zeros elsewhere, and -1 for info."""
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if exactly:
            assert ops.same_bits(x[mask], y[mask])
        else:
            np.testing.assert_allclose(x[mask], y[mask], rtol=1e-3, atol=1e-4)
        is_info = x.dtype == np.int32 and x.ndim == 1
        assert (x[~mask] == (-1 if is_info else 0)).all()


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel([*ops.REDUCED, *ops.COMPOSITE], SIZES, paths=ops.PATHS),
    ids=ops.ids,
)
def test_entries_are_computed_or_zero(op, kernel, dtype):
    sizes = [n for i, n in enumerate(SIZES) if ops.serves(op, kernel, dtype, n, NRHS[i % 2])]
    sizes = sizes[:3] if op.composite else sizes
    cases = [
        op.operands(dtype, batch=(BATCH,), n=n, nrhs=NRHS[SIZES.index(n) % 2], seed=n)
        for n in sizes
    ]
    chosen = [masks()[i % 5] for i in range(len(cases))]
    masked = [(*spoiled(x, mask), mask) for x, mask in zip(cases, chosen, strict=True)]
    results = ops.on_each(with_mask(op), masked, kernel)
    for x, y, mask in zip(results, ops.on_each(plain(op), cases, kernel), chosen, strict=True):
        check_masked(x, y, mask, exactly=kernel not in ops.PATHS and not op.composite)


@pytest.mark.parametrize("mask", masks(), ids=("random", "runs", "one", "none", "all"))
@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_every_mask(op, mask):
    for n in (3, 17, 40):
        operands = op.operands("float32", batch=(BATCH,), n=n, nrhs=2)
        result = with_mask(op)(*spoiled(operands, mask), mask)
        check_masked(result, plain(op)(*operands), mask, exactly=True)


FACTORS = {
    "lu": lambda a, **where: jb.lu(a, return_info=True, **where),
    "lu_factor": jb.lu_factor,
    "lu-tall": lambda a, **where: jb.lu(a[..., :-1], **where),
    "det": jb.det,
    "slogdet": jb.slogdet,
    "cho_factor": lambda a, **where: jb.cho_factor(
        a @ jnp.conj(jnp.swapaxes(a, -1, -2)) + jnp.eye(a.shape[-1]), **where
    )[0],
}


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("name", FACTORS)
def test_factors_and_determinants(name, dtype):
    for n in (3, 9, 33, 70):
        a = general(np.random.default_rng(n), dtype, (BATCH, n, n)).astype(dtype)
        for mask in masks():
            (x,) = spoiled((a,), mask)
            result = FACTORS[name](x, where=mask)
            check_masked(result, FACTORS[name](a), mask, exactly=name != "cho_factor")


@pytest.mark.parametrize("trans", (0, 1, 2))
def test_solves_with_factors(trans):
    rng = np.random.default_rng(0)
    a, b = general(rng, "complex128", (BATCH, 6, 6)), rng.standard_normal((BATCH, 6, 2))
    expected = jb.lu_solve(jb.lu_factor(a), b, trans)
    for mask in masks():
        x, c = spoiled((a, b), mask)
        result = jb.lu_solve(jb.lu_factor(x, where=mask), c, trans, where=mask)
        check_masked(result, expected, mask, exactly=True)


def test_refined_solves_say_what_they_left():
    op = ops.BY_NAME["refined_solve-lower"]
    a, b = op.operands("float64", batch=(9,), n=5, nrhs=2)
    mask = np.arange(9) % 2 == 0
    x, info = jb.refined_solve(*spoiled((a, b), mask), lower=True, where=mask)
    op.check((a[mask], b[mask]), np.asarray(x)[mask])
    assert not np.asarray(x)[~mask].any()
    np.testing.assert_array_equal(info.info, np.where(mask, 0, -1))
    np.testing.assert_array_equal(info.converged, mask)
    for field in (info.steps, info.backward_error, info.rescued):
        assert not np.asarray(field)[~mask].any()
    _, info = jb.refined_solve(a[..., :0, :0], b[..., :0, :], where=mask)
    np.testing.assert_array_equal(info.converged, mask)


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_masks_broadcast_and_map_like_operands(op):
    a, b = op.operands("float64", batch=(4,), n=3, nrhs=2)
    mask = np.array([[True, False, True, False], [False, False, True, True]])
    expected = np.where(mask[..., None, None], op(a, b), 0)

    def solve(a, b, where):
        return op.function(a, b, **op.options, where=where)

    two = np.broadcast_to(b, (2, *b.shape))
    for x in (
        solve(a, two, mask),
        jax.vmap(solve, (None, None, 0))(a, b, mask),
        jax.vmap(jax.vmap(solve), (None, None, 0))(a, b, mask),
    ):
        np.testing.assert_allclose(x, expected, rtol=1e-12, atol=1e-14)
    for x in (
        solve(a, two, mask[:, :1]),
        jax.vmap(jax.vmap(solve, (0, 0, None)), (None, None, 0))(a, b, mask[:, 0]),
    ):
        y = np.where(mask[:, :1, None, None], op(a, b), 0)
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(solve(a, b, False), np.zeros_like(b))


@pytest.mark.parametrize(
    ("op", "path"), ops.by_path([*ops.REDUCED, *ops.ONE_COMPOSITE]), ids=ops.ids
)
def test_a_dimension_that_only_the_mask_has(op, path):
    """One result serves it, and its derivative counts the entries."""
    operands = op.operands("float64", n=3, nrhs=2)
    mask = np.array([True, False, True])

    def masked(*xs):
        return jax.vmap(lambda m: op.function(*xs, **op.options, where=m))(mask)

    with ops.force_kernel(path):
        x = jax.jit(masked)(*operands)
    y = np.asarray(op(*operands))
    np.testing.assert_allclose(x, np.where(mask[:, None, None], y, 0), rtol=1e-9, atol=1e-12)
    gradient = ops.gradient(masked)(*operands)
    np.testing.assert_allclose(
        gradient, 2 * np.asarray(ops.gradient(op)(*operands)), rtol=1e-9, atol=1e-12
    )


FUNCTIONS = {
    "cholesky": lambda a, **where: jb.cholesky(a @ a.mT + jnp.eye(3), **where),
    "lu": lambda a, **where: jb.lu(a, **where)[0],
    "qr": lambda a, **where: jb.qr(a, **where)[0],
    "inv": jb.inv,
    "solve": lambda a, **where: jb.solve(a, a, **where),
    "lu_solve": lambda a, **where: jb.lu_solve(jb.lu_factor(a), a + 1, **where),
    "qr_multiply": lambda a, **where: jb.qr_multiply(a, a[..., 0] / 9, a, **where),
    "householder_product": lambda a, **where: jb.householder_product(a, a[..., 0] / 9, **where),
    "lstsq": lambda a, **where: jb.lstsq(a, a + 1, **where).x,
    "lstsq-cholesky": lambda a, **where: jb.lstsq(a, a + 1, method="cholesky", **where).x,
    "refined_solve": lambda a, **where: jb.refined_solve(a, a, assume_a="gen", **where)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_of_fewer_dimensions(name):
    f = FUNCTIONS[name]
    a = general(np.random.default_rng(0), "float64", (2, 4, 3, 3))
    expected = np.asarray(f(a))
    for mask in (np.array([True, False, False, True]), np.array([[True], [False]]), np.bool_(True)):
        full = np.broadcast_to(mask, (2, 4))[..., None, None]
        np.testing.assert_allclose(
            f(a, where=mask), np.where(full, expected, 0), rtol=1e-9, atol=1e-11
        )


@pytest.mark.parametrize("assume_a", ("pos", "gen"))
def test_info_beside_derivatives(assume_a):
    a, b = ops.of(f"solve_{assume_a}")[0].operands("float64", batch=(3,), n=3)
    mask = np.array([True, False, True])
    for matrix in (a, a[0]):

        def solve(b, matrix=matrix):
            return jb.solve(matrix, b, assume_a=assume_a, where=mask, return_info=True)

        (_, info), _ = jax.jvp(lambda b: solve(b), (b,), (b,))
        np.testing.assert_array_equal(info, [0, -1, 0])


def test_least_squares_say_what_they_left():
    a = np.random.default_rng(0).standard_normal((4, 5, 3))
    b = a[..., :2] + 1
    mask = np.array([True, False, True, False])
    expected = jb.lstsq(a[mask], b[mask])
    for method in ("qr", "cholesky"):
        found = jb.lstsq(*spoiled((a, b), mask), method=method, where=mask)
        np.testing.assert_array_equal(found.info, np.where(mask, 0, -1))
        np.testing.assert_array_equal(found.rank, np.where(mask, 3, 0))
        for x, y in ((found.x, expected.x), (found.residuals, expected.residuals)):
            np.testing.assert_allclose(np.asarray(x)[mask], y, rtol=1e-9)
            assert not np.asarray(x)[~mask].any()
    gradient = jax.grad(lambda a: jnp.sum(jb.lstsq(a, b, where=mask).x ** 2))(a)
    assert not np.asarray(gradient)[~mask].any()


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_a_matrix_for_many_right_hand_sides_is_computed_if_one_is(op):
    """Also where it is one batch: a gradient sums over the entries that were asked for."""
    a, b = op.operands("float64", batch=(5,), n=3, nrhs=2)
    a, mask = a[:1], np.array([True, False, True, False, False])

    def loss(a, b):
        return jnp.sum(jnp.sin(op.function(a, b, **op.options, where=mask)))

    def reference(a, b):
        return jnp.sum(jnp.sin(op(a, b[mask])))

    (da, db), (expected_da, expected_db) = (jax.grad(f, (0, 1))(a, b) for f in (loss, reference))
    np.testing.assert_allclose(da, expected_da, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(db, expected_db, rtol=1e-10, atol=1e-13)
    x, c = a, np.where(mask[:, None, None], b, np.nan)
    np.testing.assert_allclose(jax.grad(loss)(x, c), expected_da, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("op", "path"), ops.by_path([*ops.REDUCED, *ops.ONE_COMPOSITE], ("lax",)), ids=ops.ids
)
def test_derivatives(op, path):
    """Those of the entries alone, whatever stands in the others; forward, reverse, and nested."""
    operands = op.operands("float64", batch=(6,), n=3, nrhs=2)
    mask = np.array([True, False, False, True, True, False])
    masked = spoiled(operands, mask)

    def ours(*xs):
        return op.function(*xs, **op.options, where=mask)

    def derivatives(f, xs):
        tangents = tuple(jnp.where(jnp.isnan(x), x, jnp.cos(x)) for x in xs)
        gradient = ops.gradient(f)
        along, directed = jax.jvp(f, xs, tangents)
        _, twice = jax.jvp(lambda *x: gradient(*x), xs, tangents)
        return along, directed, gradient(*xs), twice

    with ops.force_kernel(path):
        found = derivatives(ours, masked)
        expected = derivatives(op, tuple(x[mask] for x in operands))
    for x, y in zip(found, expected, strict=True):
        read = ~np.isnan(y)
        np.testing.assert_allclose(
            np.asarray(x)[mask][read], np.asarray(y)[read], rtol=1e-9, atol=1e-11
        )
        assert (np.asarray(x)[~mask] == 0).all()


@pytest.mark.parametrize("f", (jb.det, lambda a, **w: jb.slogdet(a, **w)[1], jb.inv))
def test_derivatives_of_functions_of_a_matrix(f):
    a = general(np.random.default_rng(0), "float64", (4, 3, 3))
    a[3, 0] = 0  # singular: of the determinant it has another rule
    mask = np.array([True, False, True, False])
    gradient = jax.grad(lambda a: jnp.sum(f(a, where=mask)))(a)
    expected = jax.grad(lambda a: jnp.sum(f(a)))(a[mask])
    np.testing.assert_allclose(gradient[mask], expected, rtol=1e-12)
    assert (np.asarray(gradient)[~mask] == 0).all()


def test_a_loop_that_leaves_what_is_done():
    """As simulators do: the mask is a value of the program."""
    op = ops.BY_NAME["solve_gen"]
    a, b = op.operands("float64", batch=(8,), n=4)

    @jax.jit
    def run(a, b):
        def step(state):
            x, active, count = state
            x = jnp.where(active[:, None, None], jb.solve(a, b + x, where=active), x)
            return x, active & (jnp.arange(8) > count), count + 1

        start = (jnp.zeros_like(b), jnp.ones(8, bool), 0)
        return jax.lax.while_loop(lambda state: state[1].any(), step, start)[0]

    x = run(a, b)
    for i in range(8):
        y = np.zeros((4, 1))
        for _ in range(max(i, 1) + (i > 0)):
            y = np.linalg.solve(a[i], b[i] + y)
        np.testing.assert_allclose(x[i], y, rtol=1e-10)


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_sharded_batches_stay_where_they_are(op):
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))
    mask = np.arange(16) % 3 == 0
    operands = op.operands("float32", batch=(16,), n=5, nrhs=2)
    arrays = jax.device_put((*spoiled(operands, mask), mask), spread)
    program = jax.jit(with_mask(op)).lower(*arrays).compile()
    assert "all-gather" not in program.as_text()
    check_masked(program(*arrays), plain(op)(*operands), mask, exactly=True)


def test_a_mask_for_all_of_a_sharded_batch():
    """Nothing is gathered for it, and an explicit mesh takes one that is not spread."""
    devices = jax.devices()
    a = general(np.random.default_rng(0), "float64", (16, 3, 3))
    functions = jb.inv, jb.det, lambda a, **where: jb.lu(a, **where)[0]
    slopes = [jax.jit(jax.grad(lambda a, f=f: jnp.sum(f(a) ** 2)))(a[:8]) for f in functions]
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((len(devices),), ("i",), axis_types=(axis_type,))
        spread = jax.device_put(a, jax.sharding.NamedSharding(mesh, PartitionSpec("i")))
        with jax.set_mesh(mesh):
            for f, expected in zip(functions, slopes, strict=True):
                program = jax.jit(lambda a, m, f=f: f(a, where=m)).lower(spread, True).compile()
                assert "all-gather" not in program.as_text()
                np.testing.assert_allclose(program(spread, True), f(a), rtol=1e-9, atol=1e-12)
                gradient = jax.jit(jax.grad(lambda a, m, f=f: jnp.sum(f(a, where=m) ** 2)))(
                    spread, np.arange(16) < 8
                )
                np.testing.assert_allclose(np.asarray(gradient)[:8], expected, rtol=1e-8, atol=1e-9)
                assert not np.asarray(gradient)[8:].any()


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_exported_for_any_batch(op):
    mask = np.arange(7) % 2 == 0
    operands = op.operands("float32", batch=(7,), n=4, nrhs=2)
    (batch,) = jax.export.symbolic_shape("b")
    types = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (*operands, mask)]
    exported = jax.export.export(
        jax.jit(with_mask(op)), disabled_checks=jb.export_disabled_checks()
    )(*types)
    result = exported.call(*spoiled(operands, mask), mask)
    check_masked(result, plain(op)(*operands), mask, exactly=True)


@pytest.mark.parametrize("dtype", ops.STORED)
def test_16_bit_storage(dtype):
    a, b = ops.of("solve_pos")[0].operands("float32", batch=(40,), n=5)
    x, y = (jnp.asarray(z, dtype) for z in (a, b))
    mask = np.arange(40) % 3 > 0
    options = {"symmetrize_input": False, "upper": True, "return_info": True}
    result = jb.cholesky(x, where=mask, **options)
    check_masked(result, jb.cholesky(x, **options), mask, exactly=True)
    options = {"assume_a": "pos", "return_info": True}
    result = jb.solve(x, y, where=mask, **options)
    check_masked(result, jb.solve(x, y, **options), mask, exactly=True)


@pytest.mark.parametrize("f", (jb.cholesky, jb.inv, jb.lu, jb.det, jb.slogdet, jb.lu_factor))
def test_errors(f):
    a = np.eye(3)[None].repeat(4, 0)
    with pytest.raises(TypeError, match="where has dtype int64; accepted is bool"):
        f(a, where=np.ones(4, int))
    with pytest.raises(TypeError, match="where must be an array of dtype bool, got 'yes'"):
        f(a, where="yes")
    for shape in ((3,), (2, 4), (4, 1)):
        with pytest.raises(ValueError, match=r"where of shape .* does not broadcast"):
            f(a, where=np.ones(shape, bool))
