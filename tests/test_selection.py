"""What runs without --exhaustive."""

import itertools

import ops
import selection


def test_a_cover_has_every_value_and_every_pair_of_operation_dtype_and_kernel():
    rows = ops.WITH_KERNELS
    product = itertools.product(rows, ops.DTYPES, ("", "lax"), (1, 2, 3))
    cases = [
        {"op": op, "dtype": dtype, "kernel": kernel, "n": n} for op, dtype, kernel, n in product
    ]
    chosen = [cases[i] for i in selection.cover(cases, "a test")]
    operations = {op.operation for op in rows}
    assert {(x["op"].operation, x["dtype"]) for x in chosen} == {
        *itertools.product(operations, ops.DTYPES)
    }
    assert {(x["dtype"], x["kernel"]) for x in chosen} == {
        *itertools.product(ops.DTYPES, ("", "lax"))
    }
    assert {(x["op"].operation, x["kernel"]) for x in chosen} == {
        *itertools.product(operations, ("", "lax"))
    }
    assert {x["n"] for x in chosen} == {1, 2, 3}
    assert len(chosen) <= 2 * len(operations) * len(ops.DTYPES)


def test_every_row_of_a_test_that_asks_for_it():
    cases = [{"op": op} for op in ops.TABLE]
    assert selection.cover(cases, "a test", every_row=True) == set(range(len(cases)))
    assert len(selection.cover(cases, "a test")) == len({op.operation for op in ops.TABLE})


def test_tests_of_other_names_take_other_rows():
    cases = [{"op": op} for op in ops.of("triangular_solve")]
    chosen = {min(selection.cover(cases, f"test {i}")) for i in range(500)}
    assert chosen == set(range(len(cases)))


def test_a_case_alone_is_kept():
    assert selection.cover([{}], "a test") == {0}
    assert selection.cover([{"op": ops.TABLE[0], "n": 3}], "a test") == {0}
