"""What limits a proof: what reduced the margins, by name, as shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping


def finite(losses: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers, as a record can hold them."""
    return {name: lost for name, lost in losses.items() if math.isfinite(lost)}


def mean_shares(all_losses: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean share, over several proofs, of each loss in all that a margin lost."""
    totals = [(losses, sum(losses.values())) for losses in all_losses]
    shares = [{name: lost / total for name, lost in losses.items()} for losses, total in totals if total > 0]
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: statistics.fmean(one.get(name, 0.0) for one in shares) for name in names}


def lost_most(shares: Mapping[str, float], count: int = 3) -> str:
    """The largest shares in words."""
    most = sorted(shares.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in most) or "-"
