"""Which cases of a test run without --exhaustive: a cover of its parameters, not their product.

Of the cases of one test, the cover holds every value of every parameter and every pair of an
operation, a dtype and a kernel that occurs. A row of the table counts as its operation: which of an
operation's rows stand for it changes from test to test. A test marked `every_row` keeps them all.
"""

import itertools
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from rows import Op

Facet = tuple[str, Hashable]
# Parameters by these names are covered in pairs.
_PAIRED = ("op", "dtype", "stored", "kernel", "path")


def _facets(params: Mapping[str, Any], *, rows: bool) -> Iterable[frozenset[Facet]]:
    """What a case stands for; first, for the test itself."""
    yield frozenset()
    values = {
        name: value.operation if isinstance(value, Op) else repr(value)
        for name, value in params.items()
    }
    for facet in values.items():
        yield frozenset([facet])
    for pair in itertools.combinations([x for x in values.items() if x[0] in _PAIRED], 2):
        yield frozenset(pair)
    if rows:
        yield from (frozenset([("row", name)]) for name in _rows(params))


def _rows(params: Mapping[str, Any]) -> set[str]:
    return {value.name for value in params.values() if isinstance(value, Op)}


def _is_slow(params: Mapping[str, Any]) -> bool:
    """Of composite operations, one row is the quickest to compile."""
    return any(isinstance(x, Op) and x.composite and not x.usual for x in params.values())


def cover(cases: Sequence[Mapping[str, Any]], name: str, *, every_row: bool = False) -> set[int]:
    """The indices of cases that together have every facet, few of them and always the same.

    The most new facets come first; of equals, a row that was not yet taken and is no slow one, then
    the next in an order that begins somewhere else for each test's name.
    """
    facets = [set(_facets(params, rows=every_row)) for params in cases]
    missing = set().union(*facets)
    start = zlib.crc32(name.encode()) % len(cases)
    order = [*range(start, len(cases)), *range(start)]
    chosen: set[int] = set()
    used: set[str] = set()
    while missing:
        best = max(
            order,
            key=lambda i: (
                len(facets[i] & missing),
                not _rows(cases[i]) <= used,
                not _is_slow(cases[i]),
            ),
        )
        chosen.add(best)
        missing -= facets[best]
        used |= _rows(cases[best])
    return chosen
