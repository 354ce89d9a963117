"""Proved radii beside those of an attack, as a figure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from holdfast.report.style import PALETTE, new_figure

_MARKS = "os^vDP*X<"


def draw_beside_attack(groups: Mapping[str, Iterable[tuple[float, float | None]]]) -> Figure:
    """A point for each input that an attack has changed, a style for each group: on the diagonal nothing is left.

    Args:
        groups: by name, the proved radius and that of the attack; without a point where one is 0 or missing.
    """
    figure = new_figure(5.5, 3.6)
    panel = figure.subplots()
    looks = zip(itertools.cycle(PALETTE), itertools.cycle(_MARKS), strict=False)
    reach: list[float] = []
    for (colour, mark), (name, radii) in zip(looks, groups.items(), strict=False):
        points = [(attack, proved) for proved, attack in radii if attack and proved]
        if points:
            panel.plot(*zip(*points, strict=True), mark, color=colour, label=name, markersize=4, alpha=0.8)
            reach += itertools.chain(*points)
    if reach:
        ends = (min(reach), max(reach))
        panel.plot(ends, ends, ":", color="black", linewidth=1, label="proved = attacked")
        figure.legend(frameon=False, loc="outside lower center", ncols=3)
    panel.set(xlabel="l2 radius of an attack", ylabel="proved l2 radius", xscale="log", yscale="log")
    panel.grid(alpha=0.25)
    return figure
