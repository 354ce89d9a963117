"""A network at its centre: where every piece stands, and how linear functions of its inputs depend on the perturbation.

Let ũ be the float64 input of a piece, δ its displacement when the network's input moves by G, and A the derivative at ũ
(any fixed slopes at a kink). A piece's output moves by A δ + e(δ), plus what rounding did at ũ. A covector c at the
input of a piece is pulled back through the A's; with μ_l the covector at the output of piece l (docs/math/forms.md, 1),

    c·δ = first order + Σ_l ⟨μ_l, e_l(δ_l)⟩ + tiny,    |tiny| <= Σ_l (‖μ_l‖ d_l + ‖lost_l‖ ‖δ_l‖),

d_l the rounding of the value of piece l, lost_l that of the pull through it. The affine pieces at the beginning count
as one, the entrance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.local import LONGEST, UNDERFLOW, Local
from holdfast.compositions.forms.region import Region
from holdfast.errors import MemoryLimitError
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, up
from holdfast.network.network import Network, Residual


@dataclass
class Standing:
    """A piece where it stands: its input (n, d), the rounding of its value, and, if it is not affine, its local."""

    piece: Piece
    u: Tensor
    defect: float
    local: Local | None = None


@final
@dataclass(frozen=True)
class Covectors:
    """Linear functions of one place's input (or of the features), pulled back to the entrance.

    Attributes:
        X: (K, p) their first-order rows: the function is scale · X·a to first order.
        at: for every earlier place with a local, (K, n, d) the covectors at its output.
        lengths: (K, places) bounds of the covectors' norms at the outputs of all places.
        still: (K) a bound of the part of tiny that does not depend on the scale.
        moving: (K, places) factors of the bounds of ‖δ‖ at the inputs of all places.
        drift: (K) a factor of the scale.
    """

    X: Float64[Tensor, "K p"]
    at: dict[int, Tensor]
    lengths: Float64[Tensor, "K places"]
    still: Tensor
    moving: Float64[Tensor, "K places"]
    drift: Tensor

    def __len__(self) -> int:
        return len(self.X)

    def without_places(self) -> Covectors:
        """What stays of them when all earlier places have seen them."""
        return replace(self, at={})

    @classmethod
    def joined(cls, parts: Sequence[Covectors]) -> Covectors:
        """Those of all parts, without places."""
        columns = ("X", "lengths", "still", "moving", "drift")
        X, *others = (torch.cat([getattr(part, name) for part in parts]) for name in columns)
        return cls(X, {}, *others)

    def tiny(self, scale: float, moved: Float64[Tensor, " places"]) -> Tensor:
        """(K) the bound of tiny, given those of ‖δ‖."""
        return up(self.still + self.moving @ moved + self.drift * scale, 1e-12) + UNDERFLOW


@final
class CentreWalk:
    """The places of a network at one input, in order of computation, and its margins.

    Args:
        network: the classifier.
        x: (n, d) float64.

    Attributes:
        places: all pieces behind the entrance.
        stages: which places belong to a stage, whether it is residual, and the rounding of that sum.
        entrance: the affine pieces at the beginning, in order.
        start: (n, d) the output of the entrance.
        start_defect: what it was rounded by.
        prediction: the class y of the largest logit.
        others: the classes j with a margin.
        margins: (classes - 1) lower bounds of f_y - f_j at the features.
        rows: (classes - 1, 1, d) the margins' covectors at the features.
        row_error: (classes - 1) what these were rounded by.
    """

    def __init__(self, network: Network, x: Float64[Tensor, "n d"]) -> None:
        network.check_classes()
        self.network, stages = network, list(network.stages)
        self.entrance: list[tuple[LinearPiece, Tensor]] = []
        ball = Ball.exact(x)
        while stages and isinstance(stages[0], LinearPiece):
            self.entrance.append((stages[0], ball.mid))
            ball = stages.pop(0).value(ball)  # type: ignore[union-attr]
        self.start, self.start_defect = ball.mid, float(frobenius_upper(ball.rad))
        self.places: list[Standing] = []
        self.stages: list[tuple[list[int], bool, float]] = []
        u = self.start
        for stage in stages:
            skip, v, members, join = isinstance(stage, Residual), u, [], 0.0
            for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
                out = piece.value(Ball.exact(v))
                members.append(len(self.places))
                self.places.append(Standing(piece, v, float(frobenius_upper(out.rad))))
                v = out.mid
            if skip:
                total = Ball.exact(u) + v
                v, join = total.mid, float(frobenius_upper(total.rad))
            self.stages.append((members, skip, join))
            u = v
        self._decide(network, u)

    def _decide(self, network: Network, z: Tensor) -> None:
        head = network.head
        self.prediction = y = int(head.logits(z).argmax(-1))
        self.others = [j for j in range(len(head.bias)) if j != y]
        W, c = Ball.exact(head.weight.to(z)), Ball.exact(head.bias.to(z))
        rows = (W[y].unsqueeze(0) - W)[self.others]
        self.margins = ((rows @ z.mT).squeeze(-1) + (c[y] - c[self.others])).lower
        self.rows, self.row_error = rows.mid.unsqueeze(-2), frobenius_upper(rows.rad, (-1,))

    @property
    def curved(self) -> list[int]:
        """The places that are not affine."""
        return [i for i, place in enumerate(self.places) if not isinstance(place.piece, LinearPiece)]

    def on_every_way(self, i: int, before: int) -> bool:
        """Whether all ways to the input of a place, or to the features, lead through place i."""
        members, skip, _ = next(stage for stage in self.stages if i in stage[0])
        return not skip or before in members

    def local(self, i: int) -> Local:
        """Of a place that is not affine."""
        local = self.places[i].local
        assert local is not None
        return local

    def check_size(self) -> None:
        """Refuses what has longer inner products than rounding allows for."""
        for i in self.curved:
            place = self.places[i]
            n, d = place.u.shape
            assert place.local is not None
            longest = max(n * d, place.local.longest)
            if longest > LONGEST:
                raise MemoryLimitError(
                    f"forms takes inner products of {LONGEST} terms; {type(place.piece).__name__} of {n} x {d} numbers "
                    f"has some of {longest}: use gains, or perturb a later layer"
                )

    def beginning(self) -> Ball:
        """L (N, P): the linear part of the entrance."""
        N = self.start.numel()
        C = Ball.exact(torch.eye(N, dtype=torch.float64).reshape(N, *self.start.shape))
        for piece, u in reversed(self.entrance):
            C = piece.pull(Ball.exact(u), C)
        return C.flatten(-2, -1)

    def pulled(self, covectors: Float64[Tensor, "K n d"], before: int, region: Region) -> Covectors:
        """Covectors at the input of a place, or at the features for `before` = number of places, pulled back."""
        C = covectors
        at: dict[int, Tensor] = {}
        still = torch.zeros(len(C), dtype=torch.float64)
        lengths, moving = torch.zeros(2, len(C), len(self.places), dtype=torch.float64)
        for members, skip, join in reversed(self.stages):
            if members[0] >= before:
                continue
            behind, joined = C, skip and members[-1] < before
            if joined:
                still = still + frobenius_upper(C) * join
            for i in reversed([i for i in members if i < before]):
                place = self.places[i]
                lengths[:, i] = frobenius_upper(C)
                still = still + lengths[:, i] * place.defect
                if place.local is not None:
                    at[i] = C
                    C, moving[:, i] = place.local.pull(C)
                else:
                    assert isinstance(place.piece, LinearPiece)
                    out = place.piece.pull(Ball.exact(place.u), Ball.exact(C))
                    C, moving[:, i] = out.mid, frobenius_upper(out.rad)
            if joined:
                C = behind + C
                moving[:, members[0]] += frobenius_upper(C) * (2 * UNIT)  # the sum was rounded once
        still = still + frobenius_upper(C) * self.start_defect
        X, drift = region.reduced(C.flatten(1))
        return Covectors(X, at, lengths, still, moving, drift)
