"""A network at an input as a polynomial in the perturbation, with a bound of all that the polynomial leaves out.

See docs/math/telescoped.md: every global object is a derivative at the input, computed in closed form; only local rests
are bounded, and they reach later pieces, and the margins, through the exact Jacobians in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import NotApplicableError
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.linalg import Ball, forms
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma, up
from holdfast.linalg.squarings import gram_norm
from holdfast.network.network import Network, Residual
from holdfast.usage import give_back_memory


def refusal(network: Network) -> str | None:
    """Names what cannot be expanded, or None."""
    if not network.stages:
        return "a network without pieces has no expansion"
    return next((reason for piece in network.pieces() if (reason := piece.without_expansion()) is not None), None)


@dataclass
class Spot:
    """A piece where it stands, and what is known about it.

    Attributes:
        curved: its expansion; None for a linear piece.
        defects: (b) local rounding errors of the value and of the jets' polynomial, by degree.
        forks, joins: whether a residual branch begins before it, and ends after it.
    """

    piece: Piece
    u: Tensor
    curved: LocalExpansion | None
    forks: bool
    joins: bool
    defects: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Passage:
    """The Jacobian S from the output of one spot to the input of a later one, or to the margins.

    Attributes:
        blocks: (b, i, i') norms of its blocks from token i' to token i, or (b, classes, i') for margins.
        error: (b), or (b, classes) for margins: how far the computed one may be off, in the Frobenius norm.
        whole: (b) a bound of its Frobenius norm; without the factors of `LocalExpansion.scale`, which the others have.
    """

    blocks: Tensor
    error: Tensor
    whole: Tensor


@final
class Expansion:
    """A network at a batch of inputs: margins as cubic polynomials, and a bound of what these leave out.

    Args:
        network: the classifier.
        x: (b, n, d) float64.
        like: an expansion that may differ only in its first, linear piece, such as another word of the same sentence;
            what does not depend on that piece is taken from it. Any other expansion is of no use, but does no harm.

    Attributes:
        prediction: (b) the class y.
        margins: (b, classes) lower bounds of f_y - f_j at the features' float64 values.
        gradient: (b, classes, p) of the margins; zero for j = y.
        hessian: (b, classes, p, p).
        twist: (b, classes, p, p, p) third derivatives.
    """

    def __init__(self, network: Network, x: Float64[Tensor, "b n d"], like: Expansion | None = None) -> None:
        reason = refusal(network)
        if reason is not None:
            raise NotApplicableError(f"{network.name} cannot be expanded: {reason}")
        self.x = x
        self.directions = Directions(x.shape[-2] * x.shape[-1], x.device)
        self._head = network.head
        self._walk_values(network)
        slopes = self._walk_first()
        self._passages: list[dict[int, Passage]] = [{} for _ in self.spots]
        self._ends: dict[int, Passage] = {}
        self._adjoints: list[Tensor] = []
        if like is not None and self._stands_like(like):
            self._passages, self._ends, self._adjoints = like._passages, like._ends, like._adjoints
        else:
            self._walk_back()
        self._walk_second(slopes)

    # -- values, and the local error of each

    def _walk_values(self, network: Network) -> None:
        u = self.x
        self.spots: list[Spot] = []
        for stage in network.stages:
            branch = isinstance(stage, Residual)
            pieces = stage.pieces if isinstance(stage, Residual) else (stage,)
            v = u
            for k, piece in enumerate(pieces):
                spot = Spot(
                    piece, v, piece.expand(v, self.directions), branch and k == 0, branch and k == len(pieces) - 1
                )
                out = piece.value(Ball.exact(v))
                v, defect = out.mid, frobenius_upper(out.rad)
                if spot.joins:
                    total = Ball.exact(u) + v
                    v, defect = total.mid, defect + frobenius_upper(total.rad)
                spot.defects = [defect, *(torch.zeros_like(defect) for _ in range(3))]
                self.spots.append(spot)
            u = v
        self.features = u

    # -- jets

    def _walk_first(self) -> Tensor:
        (b, n, d), p = self.x.shape, self.directions.p
        W = self._head.weight.to(self.x)
        self.prediction = y = self._head.logits(self.features).argmax(-1)
        rows = Ball.exact(W[y]).unsqueeze(-2) - W  # (b, classes, d): the margins as functions of the features
        c = Ball.exact(self._head.bias.to(self.x))
        value = (rows @ Ball.exact(self.features.mT)).squeeze(-1) + (c[y].unsqueeze(-1) - c)
        self._rows, self.margins = rows.mid, value.lower
        self._lengths = up(frobenius_upper(self._rows, (-1,)), 1e-12)  # (b, classes)
        unit = torch.eye(p, dtype=torch.float64, device=self.x.device).reshape(p, 1, n, d).expand(p, b, n, d)
        J = self._jets_at_features(unit, 1)
        self.gradient = torch.einsum("bjc,tbc->bjt", self._rows, J.squeeze(-2))
        return J

    def _walk_second(self, J: Tensor) -> None:
        """Jets along pairs, and the twists that they make with the adjoints; a piece forgets its own after that."""
        b, classes, p = self.gradient.shape
        self._twists = self.x.new_zeros(classes, b, p, len(self.directions.first))
        H = self._jets_at_features(None, 2)
        self.twist = self.directions.symmetric(self._twists).movedim(0, 1)
        del self._twists
        pairs = torch.einsum("bjc,tbc->bjt", self._rows, H.squeeze(-2))
        self.hessian = pairs[..., self.directions.place]
        for spot in self.spots:
            if spot.curved is not None:
                own = [spot.curved.defect(k) for k in (1, 2, 3)]
                spot.defects = [spot.defects[0], *(x + y for x, y in zip(spot.defects[1:], own, strict=True))]
        rounding = gamma(2 * self._rows.shape[-1])
        self._last = [rounding * _length(J, None), rounding * _length(H, self.directions.count)]

    def _jets_at_features(self, jets: Tensor | None, k: int) -> Tensor:
        """Jets of degree k; None stands for zero, up to the first curved piece."""
        count = None if k == 1 else self.directions.count
        stream = jets
        for place, spot in enumerate(self.spots):
            if spot.forks:
                stream = jets
            if spot.curved is not None:
                if jets is None:
                    jets = spot.u.new_zeros(len(self.directions.first), *spot.u.shape)
                jets = spot.curved.jets(k, jets)
                if k == 2:
                    give_back_memory()
                    self._twists += spot.curved.twist(self._adjoints[place])
                    spot.curved.forget()
                    give_back_memory()
            elif jets is not None:
                jets, lost = _through_linear(spot, jets, count)
                spot.defects[k] = spot.defects[k] + lost / k
            if spot.joins and stream is not None:
                assert jets is not None
                jets = stream + jets
                spot.defects[k] = spot.defects[k] + 2 * UNIT * _length(jets, count)
        return self.features.new_zeros(len(self.directions.first), *self.features.shape) if jets is None else jets

    # -- Jacobians in between

    def _stands_like(self, other: Expansion) -> bool:
        """Whether the Jacobians in between are those of the other one: they begin behind the first piece."""
        (first, *rest), (others_first, *others) = self.spots, other.spots
        plain = all(spot.curved is None and not spot.forks for spot in (first, others_first))
        steps = ([(spot.piece, spot.forks, spot.joins) for spot in spots] for spots in (rest, others))
        if not plain or next(steps) != next(steps):
            return False
        values = ([*(spot.u for spot in at.spots[1:]), at.features, at._rows] for at in (self, other))
        return all(torch.equal(one, two) for one, two in zip(*values, strict=True))

    def _walk_back(self) -> None:
        """All passages, from the last source to the first, so that errors of later ones are known; the adjoints."""
        adjoints = [self._passage(source) for source in reversed(range(len(self.spots)))]
        self._adjoints = adjoints[::-1]

    def _passage(self, source: int) -> Tensor:
        """Measures the Jacobians from the output of a spot to all later ones, and gives the margins' adjoints there."""
        start = self.spots[source]
        after = self.spots[source + 1].u if source + 1 < len(self.spots) else self.features
        b, m, d = after.shape
        columns = torch.eye(m * d, dtype=torch.float64, device=after.device).reshape(m * d, 1, m, d).expand(-1, b, m, d)
        scale = None if start.curved is None else start.curved.scale()
        # A source inside a branch does not move the stream that the branch is added to.
        stream, inside = columns, self._inside(source)
        lost: list[tuple[int, Tensor]] = []
        for k in range(source + 1, len(self.spots)):
            spot = self.spots[k]
            if spot.curved is not None:
                self._passages[source][k] = _measure(columns, (m, d), scale, self._error(k, lost))
            if spot.forks:
                stream, inside = columns, False
            if spot.curved is None:
                columns, size = _through_linear(spot, columns, None)
            else:
                size = spot.curved.theta * spot.curved.push_size() * _length(columns, None)
                columns = spot.curved.push(columns)
            if spot.joins:
                if not inside:
                    columns = stream + columns
                    size = size + 2 * UNIT * _length(columns, None)
                inside = False
            lost.append((k, size))
        error = self._error(len(self.spots), lost)
        whole = up(_length(columns, None) + error, 1e-12)
        adjoint = torch.einsum("tbc,bjc->jbt", columns.squeeze(-2), self._rows).reshape(-1, b, m, d)
        slack = (error + whole * gamma(2 * self._rows.shape[-1] + 8)).unsqueeze(-1) * self._lengths
        scaled = adjoint if scale is None else adjoint * scale
        slack = slack if scale is None else slack * scale.abs().amax()
        blocks = torch.linalg.vector_norm(scaled, dim=-1).movedim(0, 1) + slack.unsqueeze(-1)  # (b, classes, m)
        self._ends[source] = Passage(up(blocks, 1e-12), slack, whole)
        give_back_memory()
        return adjoint

    def _inside(self, source: int) -> bool:
        """Whether a branch that began before the spot is still open after it."""
        open_ = False
        for spot in self.spots[: source + 1]:
            open_ = (open_ or spot.forks) and not spot.joins
        return open_

    def _error(self, target: int, lost: list[tuple[int, Tensor]]) -> Tensor:
        """(b) how far the columns at a target are from the exact ones: what was lost on the way, carried there."""
        total = torch.zeros_like(self.spots[0].defects[0])
        for k, size in lost:
            if target == len(self.spots):
                total = total + size * self._ends[k].whole
            else:
                total = total + size * (self._passages[k][target].whole if k < target - 1 else 1.0)
        return total

    # -- what a radius leaves

    def left_out(self, eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b classes"]:
        """A bound of what the margins' cubic polynomials leave out on the ball of radius eps."""
        return up(sum(self.rests(eps).values(), self.rounding(eps)), 1e-9)

    def rests(self, eps: Float64[Tensor, " b"]) -> dict[str, Float64[Tensor, "b classes"]]:
        """The same but for rounding, by kinds of pieces."""
        rests: dict[str, Tensor] = {}
        carried: list[tuple[Tensor | None, Tensor]] = []
        for k, spot in enumerate(self.spots):
            end, third = self._ends[k], None
            if spot.curved is not None:
                F = self._arriving(k, carried, eps)
                third = spot.curved.third(F, eps)
                fourth = spot.curved.fourth(up(forms.root(F) * eps.unsqueeze(-1), 1e-10), eps)
                rest = (end.blocks @ fourth.unsqueeze(-1)).squeeze(-1)
                # The twist was seen by computed adjoints; it is what `third` has beyond `fourth`.
                twist = forms.trace(third) * eps.unsqueeze(-1).square() + fourth
                rest = rest + end.error * torch.linalg.vector_norm(twist, dim=-1, keepdim=True)
                name = spot.curved.rest
                rests[name] = rests[name] + rest if name in rests else rest
            carried.append((third, _defect(spot, eps)))
        return rests

    def rounding(self, eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b classes"]:
        """A bound of what rounding does to the polynomials' values on that ball."""
        total = self._last[0] * eps + self._last[1] * eps**2
        for k, spot in enumerate(self.spots):
            total = total + self._ends[k].whole * (_defect(spot, eps) + spot.defects[3] * eps**3)
        return up(total.unsqueeze(-1) * self._lengths, 1e-9)

    def _arriving(self, k: int, carried: list[tuple[Tensor | None, Tensor]], eps: Tensor) -> Tensor:
        """(b, n, p, p) the size of F at the input of a spot: what earlier spots left out, and rounding."""
        p = self.directions.p
        u = self.spots[k].u
        A, constant = u.new_zeros(*u.shape[:2], p, p), u.new_zeros(u.shape[:2])
        for source, (third, defect) in enumerate(carried):
            passage = self._passages[source][k]
            constant = constant + (passage.whole * defect).unsqueeze(-1)
            if third is not None:
                A = A + (passage.blocks @ third.flatten(-2, -1)).reshape(*A.shape)
        A = forms.firm(A)
        return up(forms.plus(forms.square(A, eps), forms.unit(A, constant / eps.unsqueeze(-1))), 1e-10)


def _defect(spot: Spot, eps: Tensor) -> Tensor:
    """(b) the local rounding error of a spot's jets up to the second order."""
    return up(spot.defects[0] + spot.defects[1] * eps + spot.defects[2] * eps**2, 1e-10)


def _through_linear(spot: Spot, jets: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    assert isinstance(spot.piece, LinearPiece)
    out = spot.piece.push(Ball.exact(spot.u), Ball.exact(jets))
    return out.mid, _length(out.rad, count)


def _measure(columns: Tensor, shape: tuple[int, int], scale: Tensor | None, error: Tensor) -> Passage:
    """Norms of the Jacobian whose columns (m d, b, n, c) belong to the tokens and channels of the source."""
    whole = up(_length(columns, None) + error, 1e-12)
    S = columns.reshape(*shape, *columns.shape[1:]).permute(2, 3, 0, 1, 4)  # (b, i, i', d, c)
    if scale is not None:
        S, error = S * scale.reshape(-1, 1), error * scale.abs().amax()
    gram = S.mT @ S if S.shape[-1] <= S.shape[-2] else S @ S.mT
    lengths = torch.linalg.matrix_norm(S).square()
    blocks = gram_norm(gram, gamma(max(S.shape[-2:])) * lengths * 2) + error[:, None, None]
    return Passage(up(blocks, 1e-12), error, whole)


def _length(jets: Tensor, count: Tensor | None) -> Tensor:
    """(b) the Frobenius norm of jets (t, b, n, d), each counted as often as it stands for."""
    squares = jets.square().sum((-2, -1))
    if count is not None:
        squares = squares * count.unsqueeze(-1)
    return up(squares.sum(0).sqrt(), 1e-12)
