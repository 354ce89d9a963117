"""The tools of the suite itself: pairs of options, and one test for many cases."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path

import pytest

from holdfast.testing import for_every
from holdfast.testing.every import over
from holdfast.testing.layers import cases
from holdfast.testing.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(4, 2, 3, 2, 3), (2, 2), (5, 1, 1), (3, 3, 3, 3)], ids=str)
def test_every_pair_of_options_stands_in_a_row(sizes: tuple[int, ...]) -> None:
    options = {f"option {i}": range(size) for i, size in enumerate(sizes)}
    rows = pairwise(options)
    assert rows == pairwise(options)
    assert all(row.keys() == options.keys() for row in rows)
    for left, right in itertools.combinations(options, 2):
        pairs = {(row[left], row[right]) for row in rows}
        assert pairs == set(itertools.product(options[left], options[right]))
    most = sorted(sizes)[-2:]
    assert len(rows) <= 1.5 * most[0] * most[1]
    assert pairwise({"alone": (1, 2)}) == [{"alone": 1}, {"alone": 2}]


def test_every_case_is_looked_at_and_those_that_fail_are_named() -> None:
    seen = []

    def check(number: int) -> None:
        seen.append(number)
        assert number % 2, f"{number} is even"

    with pytest.raises(AssertionError, match=r"2 of 5 cases fail\n  2: AssertionError: 2 is even[^$]*\n  4: "):
        for_every(range(1, 6), check)
    assert seen == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError, match="nothing to check"):
        for_every([], check)


def test_a_check_of_a_kit_runs_over_its_cases_or_at_one() -> None:
    seen = []

    class Kit:
        @over(lambda kit: cases()[:3])
        def test_something(self, case: object) -> None:
            """What it checks."""
            seen.append(case)

    Kit().test_something()
    assert seen == list(cases()[:3])
    Kit().test_something(cases()[5])
    assert seen[3:] == [cases()[5]]
    assert (Kit.test_something.__name__, Kit.test_something.__doc__) == ("test_something", "What it checks.")


def test_planted_faults_can_be_planted() -> None:
    """What each replaces stands once in its file, and the tests that should catch it are there."""
    tests = Path(__file__).parent
    package = tests.parent / "src" / "holdfast"
    faults = tomllib.loads((tests / "faults" / "planted.toml").read_text(encoding="utf-8"))["fault"]
    assert len(faults) >= 60
    for fault in faults:
        assert (package / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) == 1, fault["name"]
        assert all((tests / name.split("::")[0]).exists() for name in fault["tests"]), fault["name"]
