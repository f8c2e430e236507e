"""Which cases run without --exhaustive: a cover of the parameters of each test, not their product.

Of each test, the cover holds every value of every parameter; of all tests of one file together,
every pair of an operation, a dtype and a kernel that occurs. A file is a transformation, mostly: it
runs for every operation in every dtype. A row of the table counts as its operation: which of an
operation's rows stand for it changes from test to test. A test marked `every_row` keeps them all.
"""

import itertools
import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from rows import Op

Facet = tuple[str, Hashable]
# Parameters by these names are covered in pairs.
_PAIRED = ("op", "dtype", "stored", "kernel", "path")

Case = Mapping[str, Any]


def _values(params: Case) -> Iterable[Facet]:
    for name, value in params.items():
        yield name, value.operation if isinstance(value, Op) else repr(value)


def _facets(params: Case, *, rows: bool) -> set[Facet]:
    """What a case stands for in its test; one facet for the test itself."""
    facets: set[Facet] = {("", None), *_values(params)}
    if rows:
        facets.update(("row", name) for name in _rows(params))
    return facets


def _pairs(params: Case) -> set[frozenset[Facet]]:
    """What a case stands for in its file."""
    paired = [x for x in _values(params) if x[0] in _PAIRED]
    return {frozenset(pair) for pair in itertools.combinations(paired, 2)}


def _rows(params: Case) -> set[str]:
    return {value.name for value in params.values() if isinstance(value, Op)}


def _is_slow(params: Case) -> bool:
    """Of composite operations, one row is the quickest to compile."""
    return any(isinstance(x, Op) and x.composite and not x.usual for x in params.values())


def cover(
    tests: Mapping[str, Sequence[Case]], every_row: Collection[str] = ()
) -> dict[str, set[int]]:
    """The indices of cases of a file's tests that together have every facet and every pair.

    They are few, and always the same. The most new facets come first, then the most new pairs; of
    equals, a row that was not yet taken and is no slow one, then the next in an order that begins
    somewhere else for each test's name. What pairs the tests leave, their further cases bring.
    """
    pairs = {name: [_pairs(x) for x in cases] for name, cases in tests.items()}
    missing = set().union(*itertools.chain.from_iterable(pairs.values()))
    chosen: dict[str, set[int]] = {name: set() for name in tests}
    used: dict[str, set[str]] = {name: set() for name in tests}

    def take(name: str, best_of: Sequence[int], news: Callable[[int], int]) -> int:
        cases = tests[name]
        best = max(
            best_of,
            key=lambda i: (
                news(i),
                len(pairs[name][i] & missing),
                not _rows(cases[i]) <= used[name],
                not _is_slow(cases[i]),
            ),
        )
        chosen[name].add(best)
        used[name] |= _rows(cases[best])
        missing.difference_update(pairs[name][best])
        return best

    for name, cases in tests.items():
        facets = [_facets(x, rows=name in every_row) for x in cases]
        wanted = set().union(*facets)
        start = zlib.crc32(name.encode()) % len(cases)
        order = [*range(start, len(cases)), *range(start)]
        while wanted:
            wanted -= facets[take(name, order, lambda i: len(facets[i] & wanted))]  # noqa: B023
    for name in tests:
        while left := [i for i, x in enumerate(pairs[name]) if x & missing]:
            take(name, left, lambda i: 0)
    return chosen
