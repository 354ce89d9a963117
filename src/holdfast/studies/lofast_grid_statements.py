"""What Havens et al. 2024 say of their grids of networks, and what the certified networks say of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from holdfast.studies.lofast_grid import LOFAST, CertifiedNetwork
from holdfast.studies.statements import Statement, judged

_COSTS = {"depth": "more layers", "heads": "more heads", "attention_norm": "larger norms of W^V and W^O"}
_CONTENT = 0.01  # clean accuracy below which nothing is lost

Measure = Callable[[CertifiedNetwork], float]


def grid_statements(results: Sequence[CertifiedNetwork], radius: float, shown: str) -> list[Statement]:
    """Statements on Figures 2 and 5, at one radius (`shown` in words): verdicts by the paper's bound."""
    ours = results[0].ours
    measures: dict[str, Measure] = {
        LOFAST: lambda one: one.certified(LOFAST, radius),
        ours: lambda one: one.certified(ours, radius),
        "the attack": lambda one: one.attacked(radius),
        "clean": lambda one: one.clean,
    }
    made = []
    for key, words in ((key, words) for key, words in _COSTS.items() if key in results[0].values):
        changes = {name: _changes(results, key, measure) for name, measure in measures.items()}
        if changes[LOFAST]:
            ends = sorted({one.values[key] for one in results})
            points = ", ".join(f"{name} {_spread(change)}" for name, change in changes.items())
            evidence = (
                f"points from {ends[0]:g} to {ends[-1]:g} at {shown}, mean (range) of {len(changes[ours])}: {points}"
            )
            made.append(judged(f"{words} cost certified accuracy", statistics.fmean(changes[LOFAST]) < 0, evidence))
    best = [max(100 * measures[name](one) for one in results) for name in (LOFAST, ours, "the attack")]
    evidence = (
        f"the best network at {shown}: {best[0]:.1f} % by {LOFAST}, {best[1]:.1f} % by {ours}, {best[2]:.1f} % left"
    )
    made.append(judged("certified accuracy is not trivial", best[0] > 10, evidence, sharper=best[1] > best[0]))
    lost = [one.clean - one.content_off for one in results]
    evidence = f"clean accuracy with content off is lower by {100 * min(lost):.2f} to {100 * max(lost):.2f} points"
    made.append(judged("the attention of these networks attends (not claimed)", min(lost) > _CONTENT, evidence))
    return made


def _changes(results: Sequence[CertifiedNetwork], key: str, measure: Measure) -> list[float]:
    """In points, from the least to the largest value of a key, for all networks that are equal but for it."""
    groups: dict[tuple[tuple[str, float], ...], list[CertifiedNetwork]] = {}
    for one in results:
        rest = {**one.values, "seed": float(one.seed)}
        groups.setdefault(tuple((name, rest[name]) for name in rest if name != key), []).append(one)
    changes = []
    for alike in groups.values():
        alike.sort(key=lambda one: one.values[key])
        if len(alike) > 1:
            changes.append(100 * (measure(alike[-1]) - measure(alike[0])))
    return changes


def _spread(changes: Sequence[float]) -> str:
    return f"{statistics.fmean(changes):+.1f} ({min(changes):+.1f} to {max(changes):+.1f})"
