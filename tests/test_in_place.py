"""`overwrite_a` and `overwrite_b`: the result takes an operand's memory, with every kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from test_cpu_kernels import cases_of, overflowing, same

from jax_batched._ffi import force_kernel

# Around the edges of the kernels; every second one has several right-hand sides.
SIZES = (1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 130, 200)
NRHS = (1, 3)
ROWS = [op for op in ops.WITH_KERNELS if op.in_place]


def in_place(op):
    """The row with its last operand's memory for the result, with info if it has some."""
    options = {**op.options, "overwrite_b" if op.takes_b else "overwrite_a": True}
    if op.can_fail:
        options["return_info"] = True
    return lambda *operands: op.function(*operands, **options)


def plain(op):
    return op.with_info if op.can_fail else op


def donated(op, cases, kernel=""):
    """The results of one program with donated operands, and whether each took one's memory."""

    def program(rest, last):
        return [in_place(op)(*x, y) for x, y in zip(rest, last, strict=True)]

    rest = [x[:-1] for x in cases]
    last = [jnp.array(x[-1]) for x in cases]
    pointers = [x.unsafe_buffer_pointer() for x in last]
    with force_kernel(kernel):
        results = jax.jit(program, donate_argnums=1)(rest, last)
    assert all(x.is_deleted() for x in last)
    first = [jax.tree.leaves(x)[0] for x in results]
    return results, [x.unsafe_buffer_pointer() == at for x, at in zip(first, pointers, strict=True)]


@pytest.mark.parametrize(("op", "kernel", "dtype"), ops.by_kernel(ROWS), ids=ops.ids)
def test_the_same_bits_in_an_operands_memory(op, kernel, dtype):
    calls = [(n, NRHS[i % 2]) for i, n in enumerate(SIZES)]
    calls = [call for call in calls if ops.serves(op, kernel, dtype, *call)]
    sizes = [n for n, _ in calls]
    cases = cases_of(op, dtype, sizes, nrhs=[nrhs for _, nrhs in calls])
    if not op.takes_b and op.options.get("symmetrize_input"):
        cases += overflowing(dtype, sizes)
    results, taken = donated(op, cases, kernel)
    assert same(results, ops.on_each(plain(op), cases, kernel))
    assert all(taken)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_both_triangles_are_read_before_either_is_written(dtype):
    """By every kernel that is chosen for some size: the triangles differ."""
    for op in (op for op in ROWS if op.options.get("symmetrize_input")):
        cases = []
        for n in (24, 60, 80, 120, 150):
            (a,) = op.operands(dtype, batch=(3,), n=n)
            cases.append((a + np.triu(a, 1) / 8 - np.tril(a, -1) / 8,))
        results, taken = donated(op, cases)
        assert same(results, ops.on_each(plain(op), cases))
        assert all(taken)


@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_an_operand_that_is_needed_is_kept(op):
    operands = op.operands("float32", batch=(33,), n=9, nrhs=2)
    arrays = [jnp.array(x) for x in operands]
    result, kept = jax.jit(lambda *xs: (in_place(op)(*xs), xs[-1]))(*arrays)
    assert same([result], [plain(op)(*operands)])
    for x in (kept, arrays[-1]):
        assert ops.same_bits(x, operands[-1])
    assert same([in_place(op)(*arrays)], [result])  # outside jit
    assert ops.same_bits(arrays[-1], operands[-1])


@pytest.mark.parametrize("op", [op for op in ops.ONE_EACH if op.in_place], ids=ops.ids)
def test_a_value_that_nothing_else_needs_is_not_copied(op):
    operands = op.operands("float32", batch=(33,), n=9, nrhs=2)

    def program(*xs):
        return in_place(op)(*xs[:-1], xs[-1] * 2)

    text = jax.jit(program).lower(*operands).compile().as_text()
    assert "output_to_operand_aliasing" in text
    assert " copy(" not in text[text.index("ENTRY") :]  # elsewhere a copy is part of the product


@pytest.mark.parametrize("op", [op for op in ROWS if op.takes_b], ids=ops.ids)
def test_a_right_hand_side_for_many_matrices_is_not_overwritten(op):
    a, b = op.operands("float32", batch=(7,), n=9, nrhs=2)
    shared = jnp.array(b[:1])
    result = jax.jit(in_place(op))(a, shared)
    assert same([result], [plain(op)(a, b[:1])])
    assert ops.same_bits(shared, b[:1])


@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_transformations(op):
    """Derivatives, batching, and the path without kernels."""
    operands = op.operands("float64", batch=(3,), n=4, nrhs=2)
    ours, theirs = (lambda *xs, f=f: jax.tree.leaves(f(*xs))[0] for f in (in_place(op), plain(op)))
    assert same([jax.vmap(ours)(*operands)], [theirs(*operands)])
    np.testing.assert_allclose(
        ops.gradient(ours)(*operands), ops.gradient(theirs)(*operands), rtol=1e-12
    )
    with force_kernel("lax"):
        x = jax.jit(ours)(*operands)
    op.check(operands, x)
