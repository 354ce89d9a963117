"""Lower bounds of margins where the rests of all places are settled (docs/math/forms.md, section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.batches import Batches
from holdfast.compositions.forms.least import Minorant
from holdfast.compositions.forms.local import Problem
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.walk import CentreWalk
from holdfast.linalg.rounding import up

_TRIFLE = 0.002  # of a margin, that all places together may lose to what is not worth a matrix
_STEPS = 8  # improvements of the kinks' parameters
_FEW = 512  # branches of a box, where many are tried


@final
@dataclass(frozen=True)
class Lower:
    """Lower bounds of the margins over a region.

    Attributes:
        margins: (classes) of f_y - f_j; infinite for j = y.
        least: the smallest of them where all are positive; otherwise one that is not.
        losses: of the margin that is smallest, what was taken off its value at the centre, by name.
        parts: into how many the region was divided, for one margin at most.
    """

    margins: Tensor
    least: float
    losses: dict[str, float]
    parts: int = 1


@final
@dataclass(frozen=True)
class Leads:
    """What is known of the margins at every scale.

    Attributes:
        walk: the network at its centre.
        region: what may be perturbed.
        gradients: (classes - 1, p) of the margins.
        slopes: (classes - 1) what first order takes off them, for scale 1.
        batches: what all places have prepared.
    """

    walk: CentreWalk
    region: Region
    gradients: Tensor
    slopes: Tensor
    batches: Batches


@final
@dataclass(frozen=True)
class Settled:
    """The margins with the rests of one scale, which hold on all smaller ones.

    Attributes:
        leads: the margins at every scale.
        radius: of the region at this scale.
        tiny: (classes - 1) what rounding takes off.
        rests: by name, what all else beyond first order takes off.
        minorants: by margin, as far as they were asked for.
    """

    leads: Leads
    radius: float
    tiny: Tensor
    rests: dict[str, Tensor]
    minorants: dict[int, Minorant] = field(default_factory=dict)

    @cached_property
    def lost(self) -> Tensor:
        """What rounding and rests take off together."""
        return sum(self.rests.values(), self.tiny)

    def cheap(self, scale: float) -> Tensor:
        """(classes - 1) bounds of the margins in which everything that is lost is added up."""
        margins = self.leads.walk.margins
        lost = up(self.lost + self.leads.slopes * scale, 1e-10)
        cheap = margins - lost - margins.abs() * 1e-15
        return cheap.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)

    def glance(self, scale: float) -> Lower:
        """These bounds, and what takes most off."""
        cheap = self.cheap(scale)
        margins = torch.full((len(cheap) + 1,), math.inf, dtype=torch.float64)
        margins[self.leads.walk.others] = cheap
        s = int(cheap.argmin())
        losses = {"first order": float(self.leads.slopes[s]) * scale}
        losses |= {name: float(rest[s]) for name, rest in self.rests.items()}
        losses["rounding"] = losses.get("rounding", 0.0) + float(self.tiny[s])
        return Lower(margins, float(cheap[s]), losses)

    def lower(self, scale: float, *, prove: bool = True, branches: int = _FEW) -> Lower:
        """The margins in order of a cheap bound; a trust-region problem for those that it leaves in question.

        Without a proof these are guesses of what it would give.
        """
        walk, cheap = self.leads.walk, self.cheap(scale)
        margins = torch.full((len(walk.others) + 1,), math.inf, dtype=torch.float64)
        margins[walk.others] = cheap
        worst, losses, parts = math.inf, {"first order": float((self.leads.slopes * scale).amax())}, 1
        for s in cheap.argsort().tolist():
            if float(cheap[s]) >= worst or worst <= 0:
                break
            minorant = self._minorant(s)
            lowest = minorant.least(scale, _STEPS, branches, prove=prove)
            bound, parts = max(lowest.value, float(cheap[s])), max(parts, lowest.parts)
            margins[walk.others[s]] = bound
            if not bound >= worst:
                worst, losses = bound, minorant.problem.breakdown(lowest.point, float(walk.margins[s]) - bound)
        return Lower(margins, worst, losses, parts)

    def _minorant(self, s: int) -> Minorant:
        if s not in self.minorants:
            walk = self.leads.walk
            value = float(walk.margins[s])
            slight = _TRIFLE * max(value, 0.0) / max(1, len(walk.curved))
            problem = Problem.of(value, self.leads.gradients[s], slight)
            problem.lose("rounding", float(self.tiny[s]))
            if self.leads.batches.expanded:
                self._expand(problem, s)
            elif math.isfinite(self.tiny[s]):  # otherwise not all places know of the scale
                self._take(problem, s)
            self.minorants[s] = Minorant(problem, self.leads.region)
        return self.minorants[s]

    def _take(self, problem: Problem, s: int) -> None:
        """What every place says of a margin."""
        ends = self.leads.batches.ends
        for i, prepared in ends.prepared.items():
            varying = ends.turning[i][s] * self.radius if i in ends.turning else None
            self.leads.walk.local(i).take(prepared, s, problem, varying)

    def _expand(self, problem: Problem, s: int) -> None:
        """The exact second order of a margin, and numbers for the third and for all that is beyond."""
        jets = self.leads.batches.jets
        assert jets is not None
        problem.add("second order", jets.forms[s], float(jets.unsure[s]))
        for name, rest in self.rests.items():
            if name != "second order":
                problem.lose(name, float(rest[s]))
