"""Which cases run without --exhaustive: a cover of the parameters of the tests, not their product.

A file is a transformation, mostly. The cover holds a case of every test and, of all tests of one
file together, every value of every parameter; of the whole suite, every pair of an operation, a
dtype and a kernel that occurs. The thorough cover holds every value of each test's parameters, and
every such pair of each file. A row of the table counts as its operation: which of an operation's
rows stand for it changes from test to test. A test marked `every_row` keeps them all.
"""

import itertools
import zlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from rows import Op

Facet = tuple[str, Hashable]
Name = tuple[str, str]  # of a test: its file, its own
# Parameters by these names are covered in pairs.
_PAIRED = ("op", "dtype", "stored", "kernel", "path")

Case = Mapping[str, Any]


def _values(params: Case) -> Iterable[Facet]:
    for name, value in params.items():
        yield name, value.operation if isinstance(value, Op) else repr(value)


def _rows(params: Case) -> set[str]:
    return {value.name for value in params.values() if isinstance(value, Op)}


def _is_slow(params: Case) -> bool:
    """Of composite operations, one row is the quickest to compile."""
    return any(isinstance(x, Op) and x.composite and not x.usual for x in params.values())


def cover(
    tests: Mapping[Name, Sequence[Case]],
    every_row: Collection[Name] = (),
    *,
    thorough: bool = False,
) -> dict[Name, set[int]]:
    """The indices of cases of tests that together have every value and every pair.

    They are few, and always the same. The tests take turns. The most new values come first, then
    the most new pairs; of equals, a row that was not yet taken and is no slow one, then the next in
    an order that begins somewhere else for each test's name. What pairs these leave, further cases
    bring.
    """

    def values_of(name: Name, params: Case) -> set[Hashable]:
        scope = name if thorough else name[:1]
        found = {(name, None), *((scope, x) for x in _values(params))}
        return found | ({(name, x) for x in _rows(params)} if name in every_row else set())

    def pairs_of(name: Name, params: Case) -> set[Hashable]:
        paired = [x for x in _values(params) if x[0] in _PAIRED]
        scope = name[:1] if thorough else ()
        return {(scope, frozenset(pair)) for pair in itertools.combinations(paired, 2)}

    values = {name: [values_of(name, x) for x in cases] for name, cases in tests.items()}
    pairs = {name: [pairs_of(name, x) for x in cases] for name, cases in tests.items()}
    covered: set[Hashable] = set()
    chosen: dict[Name, set[int]] = {name: set() for name in tests}
    used: dict[Name, set[str]] = {name: set() for name in tests}

    def take(name: Name, facets: Sequence[set[Hashable]]) -> bool:
        """Takes the case with the most that is new; False if there is none."""
        cases = tests[name]
        start = zlib.crc32(name[-1].encode()) % len(cases)
        order = [*range(start, len(cases)), *range(start)]
        left = [i for i in order if not facets[i] <= covered]
        if not left:
            return False
        best = max(
            left,
            key=lambda i: (
                len(facets[i] - covered),
                len(pairs[name][i] - covered),
                not _rows(cases[i]) <= used[name],
                not _is_slow(cases[i]),
            ),
        )
        chosen[name].add(best)
        used[name] |= _rows(cases[best])
        covered.update(values[name][best], pairs[name][best])
        return True

    for facets in (values, pairs):
        waiting = list(tests)
        while waiting:
            waiting = [name for name in waiting if take(name, facets[name])]
    return chosen
