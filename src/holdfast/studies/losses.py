"""What limits a proof: what reduced the margins, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping


def finite(losses: Mapping[str, float]) -> dict[str, float]:
    """Those that are numbers, as a record can hold them."""
    return {name: lost for name, lost in losses.items() if math.isfinite(lost)}


def lost_most(shares: Mapping[str, float], count: int = 3) -> str:
    """The largest shares in words."""
    most = sorted(shares.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in most) or "-"
