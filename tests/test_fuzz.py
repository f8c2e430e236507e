"""Random shapes, dtypes, options and vmap axes against NumPy."""

import jax
import numpy as np
import ops
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FUZZ = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
ROWS = [op for op in ops.TABLE if op.kernels]
SIZE = st.integers(0, 20) | st.sampled_from([31, 32, 33, 48, 49, 63, 64, 65, 100])


def draw_batches(draw, count):
    """Shapes that broadcast: one shape with dimensions set to 1 or cut off at the front."""
    full = draw(st.lists(st.integers(0, 4), max_size=3))
    shapes = []
    for _ in range(count):
        kept = [size if draw(st.booleans()) else 1 for size in full]
        shapes.append(tuple(kept[draw(st.integers(0, len(full))) :]))
    return shapes


@FUZZ
@given(st.data())
def test_calls(data):
    """Broadcast batches of any shape, empty ones too."""
    draw = data.draw
    op = draw(st.sampled_from(ROWS))
    dtype = draw(st.sampled_from(ops.DTYPES))
    n = draw(SIZE)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    batches = draw_batches(draw, 2 if op.takes_b else 1)
    a = op.spoil(op.make(rng, dtype, (*batches[0], n, n))).astype(dtype)
    operands = [a]
    if op.takes_b:
        operands.append(op.right_hand_side(rng, dtype, batches[1], n, draw(st.integers(0, 9))))
    x = np.asarray(op(*operands))
    batch = np.broadcast_shapes(*batches)
    assert x.shape == (*batch, *operands[-1].shape[-2:])
    if x.size:
        op.check([np.broadcast_to(y, (*batch, *y.shape[-2:])) for y in operands], x)


@FUZZ
@given(st.data())
def test_nested_vmaps(data):
    """Up to three levels, each mapping any axis of any of the operands, out to any axis."""
    draw = data.draw
    op = draw(st.sampled_from(ROWS))
    dtype = draw(st.sampled_from(ops.DTYPES))
    n, nrhs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    count = 2 if op.takes_b else 1
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    masks = st.lists(st.booleans(), min_size=count, max_size=count).filter(any)
    mapped = [draw(masks) for _ in sizes]  # of each level, outermost first: which operands

    def own_batch(i):
        return tuple(size for size, has in zip(sizes, mapped, strict=True) if has[i])

    operands = [op.spoil(op.make(rng, dtype, (*own_batch(0), n, n))).astype(dtype)]
    if op.takes_b:
        operands.append(op.right_hand_side(rng, dtype, own_batch(1), n, nrhs))
    full = [
        np.broadcast_to(
            y[tuple(slice(None) if has[i] else None for has in mapped)],
            (*sizes, *y.shape[-2:]),
        )
        for i, y in enumerate(operands)
    ]

    # Innermost level first: move its axis, leading among those left, to where vmap takes it.
    f, moved, out_axes = op, list(operands), []
    for level in reversed(range(len(sizes))):
        in_axes = []
        for i in range(count):
            levels_left = sum(has[i] for has in mapped[level + 1 :])
            rank = 2 + levels_left
            in_axes.append(draw(st.integers(-rank - 1, rank)) if mapped[level][i] else None)
        out_axes.append(draw(st.integers(0, 2 + len(sizes) - level - 1)))
        f = jax.vmap(f, tuple(in_axes), out_axes[-1])
        for i, axis in enumerate(in_axes):
            if axis is not None:
                outer = sum(has[i] for has in mapped[:level])  # whose axes stay in front
                rank = moved[i].ndim - outer
                moved[i] = np.moveaxis(moved[i], outer, outer + axis % rank)
    x = np.asarray(f(*moved))
    for depth, axis in enumerate(reversed(out_axes)):  # outermost first
        x = np.moveaxis(x, depth + axis, depth)
    op.check(full, x)


@FUZZ
@given(st.data())
def test_failures(data):
    """Any matrices of a batch fail at any column; the results of the others keep their bits."""
    draw = data.draw
    op = draw(st.sampled_from(ops.CAN_FAIL))
    dtype = draw(st.sampled_from(ops.DTYPES))
    n, batch = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    columns = np.array(draw(st.lists(st.integers(0, n), min_size=batch, max_size=batch)))
    value = draw(st.sampled_from([-1.0, 0.0, np.nan]))
    operands = op.operands(dtype, batch=(batch,), n=n, nrhs=2, seed=n)
    healthy = np.asarray(op(*operands))
    failed = np.flatnonzero(columns)
    spoiled = operands[0].copy()
    spoiled[failed, columns[failed] - 1, columns[failed] - 1] = value
    x, info = op.with_info(spoiled, *operands[1:])
    np.testing.assert_array_equal(info, columns)
    fine = columns == 0
    assert ops.same_bits(np.asarray(x)[fine], healthy[fine])
    assert np.isnan(np.asarray(x)[~fine]).any(axis=(-2, -1)).all()
