"""What runs without --exhaustive."""

import itertools

import ops
import selection

PAIRED = ("op", "dtype", "kernel")


def facets(case, names):
    return tuple(case[x].operation if x == "op" else case[x] for x in names)


def product_of_rows():
    product = itertools.product(ops.WITH_KERNELS, ops.DTYPES, ("", "lax"), (1, 2, 3))
    return [dict(zip((*PAIRED, "n"), values, strict=True)) for values in product]


def chosen_cases(tests, **options):
    cover = selection.cover(tests, **options)
    return {name: [cases[i] for i in cover[name]] for name, cases in tests.items()}


def assert_all(cases, among, names):
    assert {facets(x, names) for x in cases} == {facets(x, names) for x in among}


OPERATIONS = len({op.operation for op in ops.WITH_KERNELS})


def test_every_value_in_each_file_and_every_pair_in_the_suite():
    cases = product_of_rows()
    tests = {(file, test): cases for file in ("a", "b", "c") for test in ("one", "another")}
    chosen = chosen_cases(tests)
    assert all(chosen.values())
    for file in ("a", "b", "c"):
        own = [*chosen[file, "one"], *chosen[file, "another"]]
        for name in (*PAIRED, "n"):
            assert_all(own, cases, [name])
        counts = [len(chosen[file, test]) for test in ("one", "another")]
        assert max(counts) <= 2 * min(counts)
    everything = [x for own in chosen.values() for x in own]
    for pair in itertools.combinations(PAIRED, 2):
        assert_all(everything, cases, pair)
    assert len(everything) <= 2 * OPERATIONS * len(ops.DTYPES)


def test_a_thorough_cover_has_every_value_in_each_test_and_every_pair_in_the_file():
    cases = product_of_rows()
    chosen = chosen_cases({("a", "one"): cases, ("a", "another"): cases}, thorough=True)
    for some in chosen.values():
        for name in (*PAIRED, "n"):
            assert_all(some, cases, [name])
    both = [x for some in chosen.values() for x in some]
    for pair in itertools.combinations(PAIRED, 2):
        assert_all(both, cases, pair)
    assert len(both) <= 2 * OPERATIONS * len(ops.DTYPES)


def test_every_row_of_a_test_that_asks_for_it():
    cases = [{"op": op} for op in ops.TABLE]
    tests = {("a", "all"): cases, ("a", "some"): cases}
    cover = selection.cover(tests, every_row=[("a", "all")])
    assert cover["a", "all"] == set(range(len(cases)))
    assert 0 < len(cover["a", "some"]) < OPERATIONS
    cover = selection.cover(tests, every_row=[("a", "all")], thorough=True)
    assert len(cover["a", "some"]) == len({op.operation for op in ops.TABLE})


def test_tests_of_other_names_take_other_rows():
    cases = [{"op": op} for op in ops.of("triangular_solve")]
    cover = selection.cover({("a", f"test {i}"): cases for i in range(500)})
    assert {min(chosen) for chosen in cover.values()} == set(range(len(cases)))


def test_a_case_alone_is_kept():
    tests = {("a", "a test"): [{}], ("a", "another"): [{"op": ops.TABLE[0], "n": 3}]}
    assert selection.cover(tests) == {name: {0} for name in tests}
