"""What margins were lost to, by name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

#: The names in the order in which they are shown.
LOSSES = (
    "first order",
    "second order",
    "third order",
    "kinks",
    "attention rest",
    "normalisation rest",
    "activation rest",
    "carried rests",
    "relaxation",
    "beyond first order",
    "rounding",
)


def mean_shares(all_losses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean share, over several proofs, of each loss in all that a margin lost; names of other methods come last."""
    totals = [(losses, sum(losses.values())) for losses in all_losses]
    shares = [{name: lost / total for name, lost in losses.items()} for losses, total in totals if total > 0]
    met = dict.fromkeys(name for one in shares for name in one)
    names = [name for name in LOSSES if name in met] + [name for name in met if name not in LOSSES]
    return {name: statistics.fmean(one.get(name, 0.0) for one in shares) for name in names}
