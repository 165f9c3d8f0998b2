"""That the part of the cases that `make test` runs has in it what it promises."""

from __future__ import annotations

import itertools

import pytest

import sampling

CASES = list(itertools.product(range(5), "abcd", (False, True)))
FACETS = (lambda case: case[:2], lambda case: (case[0] == 3, case[2]))


def test_a_part_has_every_value_of_every_facet(monkeypatch):
    monkeypatch.setattr(sampling, "ALL", False)
    part = sampling.cover(CASES, *FACETS)
    assert set(part) <= set(CASES) and len(part) == 20  # pairs of the first facet; the second needs none beside them
    for facet in FACETS:
        assert {facet(case) for case in part} == {facet(case) for case in CASES}
    assert part == sampling.cover(iter(CASES), *FACETS), "not the same each time"


@pytest.mark.parametrize("everything", [False, True])
def test_the_first_of_equals_is_chosen_unless_all_are_asked_for(monkeypatch, everything):
    monkeypatch.setattr(sampling, "ALL", everything)
    cases = sorted(CASES, key=lambda case: -case[0])
    wanted = cases if everything else [(4, letter, False) for letter in "abcd"]
    assert sampling.cover([*cases, *cases], lambda case: case[1]) == wanted
