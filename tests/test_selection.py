"""What runs without --exhaustive."""

import itertools

import ops
import selection

PAIRED = ("op", "dtype", "kernel")


def facets(case, names):
    return tuple(case[x].operation if x == "op" else case[x] for x in names)


def test_a_cover_has_every_value_in_each_test_and_every_pair_in_the_file():
    rows = ops.WITH_KERNELS
    product = itertools.product(rows, ops.DTYPES, ("", "lax"), (1, 2, 3))
    cases = [dict(zip((*PAIRED, "n"), values, strict=True)) for values in product]
    tests = {"one test": cases, "another": cases}
    cover = selection.cover(tests)
    chosen = {name: [cases[i] for i in cover[name]] for name in tests}
    operations = len({op.operation for op in rows})
    for some in chosen.values():
        for name in (*PAIRED, "n"):
            assert {facets(x, [name]) for x in some} == {facets(x, [name]) for x in cases}
    both = [*chosen["one test"], *chosen["another"]]
    for pair in itertools.combinations(PAIRED, 2):
        assert {facets(x, pair) for x in both} == {facets(x, pair) for x in cases}
    assert len(both) <= 2 * operations * len(ops.DTYPES)


def test_every_row_of_a_test_that_asks_for_it():
    cases = [{"op": op} for op in ops.TABLE]
    cover = selection.cover({"all": cases, "some": cases}, every_row=["all"])
    assert cover["all"] == set(range(len(cases)))
    assert len(cover["some"]) == len({op.operation for op in ops.TABLE})


def test_tests_of_other_names_take_other_rows():
    cases = [{"op": op} for op in ops.of("triangular_solve")]
    cover = selection.cover({f"test {i}": cases for i in range(500)})
    assert {min(chosen) for chosen in cover.values()} == set(range(len(cases)))


def test_a_case_alone_is_kept():
    tests = {"a test": [{}], "another": [{"op": ops.TABLE[0], "n": 3}]}
    assert selection.cover(tests) == {"a test": {0}, "another": {0}}
