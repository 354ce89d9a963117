"""Few combinations of options that hold every pair of them: most faults need no more than two options to show."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

_Pair = tuple[tuple[str, int], tuple[str, int]]  # two options, and the place of a choice for each


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows with one choice for every option, such that each pair of choices of two options stands in some row.

    Greedy and deterministic: a row begins with the first pair that is still missing, and every other option takes the
    choice that adds most missing pairs to it. For options of at most a and b choices there are little more than a b
    rows, instead of the product of all.

    Example:
        >>> len(pairwise({"heads": (1, 2, 4), "mask": (None, "shared"), "causal": (False, True)}))
        6
    """
    names = list(options)
    if len(names) < 2:
        return [{name: choice} for name in names for choice in options[name]]
    places = [(name, i) for name in names for i in range(len(options[name]))]
    missing: set[_Pair] = {(a, b) for a, b in itertools.combinations(places, 2) if a[0] != b[0]}
    order = [pair for pair in itertools.combinations(places, 2) if pair in missing]
    rows = []
    while missing:
        chosen = dict(next(pair for pair in order if pair in missing))
        for name in sorted(names, key=lambda name: -len(options[name])):
            if name not in chosen:
                chosen[name] = max(range(len(options[name])), key=lambda i: len(_new(chosen | {name: i}, missing)))
        missing -= _new(chosen, missing)
        rows.append({name: options[name][chosen[name]] for name in names})
    return rows


def _new(chosen: dict[str, int], missing: set[_Pair]) -> set[_Pair]:
    """The missing pairs that a row holds."""
    places = list(chosen.items())
    pairs = itertools.chain(itertools.combinations(places, 2), itertools.combinations(places[::-1], 2))
    return {(a, b) for a, b in pairs if (a, b) in missing}
