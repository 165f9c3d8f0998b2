"""A part of many cases in which everything that matters still occurs, for tests too slow to run all at every change."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

Case = TypeVar("Case")

# `make test-all` runs every case.
ALL = bool(os.environ.get("FLASHBACKEND_ALL_CASES"))


def cover(cases: Iterable[Case], *facets: Callable[[Case], Hashable]) -> list[Case]:
    """Few cases with every value that each facet has in all of them; all cases with FLASHBACKEND_ALL_CASES=1.

    Greedy: the case with the most values that are still missing, the first of equals; so the same each time. To cover
    pairs, let a facet return pairs.
    """
    cases = list(dict.fromkeys(cases))
    if ALL:
        return cases
    values: list[tuple[Case, set[Any]]] = [(case, {(n, f(case)) for n, f in enumerate(facets)}) for case in cases]
    missing = set().union(*(found for _, found in values))
    chosen = []
    while missing:
        case, found = max(values, key=lambda one: len(one[1] & missing))
        chosen.append(case)
        missing -= found
    return chosen
