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
from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma
from holdfast.network.attention import Attention
from holdfast.network.base import LinearPiece, Piece
from holdfast.network.expansion.attention import LocalAttention
from holdfast.network.expansion.directions import Directions, Triples
from holdfast.network.expansion.local import Local
from holdfast.network.expansion.normalisation import LocalNormalisation
from holdfast.network.expansion.norms import gram_norm
from holdfast.network.expansion.perceptron import LocalPerceptron
from holdfast.network.mlp import Mlp
from holdfast.network.network import Network, Residual
from holdfast.network.norms import Normalisation

_CHUNK = 2**21  # numbers of a stack of third-order jets


def refusal(network: Network) -> str | None:
    """Names a piece that cannot be expanded, or None."""
    for piece in network.pieces():
        rotary = isinstance(piece, Attention) and piece.layer.rotary is not None
        if rotary or not isinstance(piece, (LinearPiece, Attention, Mlp, Normalisation)):
            return f"{type(piece).__name__} has no expansion" + (" with rotary positions" if rotary else "")
    return None


@dataclass
class Spot:
    """A piece where it stands, and what is known of it.

    Attributes:
        curved: its expansion; None for a linear piece.
        defects: (b) local rounding errors of the value and of the jets' polynomial, by degree.
        forks, joins: whether a residual branch begins before it, and ends after it.
    """

    piece: Piece
    u: Tensor
    curved: Local | None
    forks: bool
    joins: bool
    defects: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Passage:
    """The Jacobian S from the output of one spot to the input of a later one, or to the margins.

    Attributes:
        blocks: (b, i, i') norms of its blocks from token i' to token i, or (b, classes, i') for margins.
        rows: (b, i) norms of its rows of blocks.
        whole: (b) a bound of its Frobenius norm; without the factors of `Local.scale`, which the others have.
    """

    blocks: Tensor
    rows: Tensor
    whole: Tensor

    def carry(self, r: Tensor) -> Tensor:
        """(b, i) what a rest r (b, i') becomes."""
        apart = (self.blocks @ r.unsqueeze(-1)).squeeze(-1)
        return torch.minimum(apart, self.rows * torch.linalg.vector_norm(r, dim=-1, keepdim=True)) * (1 + 1e-10)


@final
class Expansion:
    """A network at a batch of inputs, to the order K.

    Args:
        network: the classifier.
        x: (b, n, d) float64.
        order: K = 2 or 3.

    Attributes:
        slopes: (p, b, classes) first derivatives of the logits; likewise `bends` (pairs, …), `twists` (triples, …).
    """

    def __init__(self, network: Network, x: Float64[Tensor, "b n d"], order: int) -> None:
        reason = refusal(network)
        if reason is not None:
            raise NotApplicableError(f"{network.name} cannot be expanded: {reason}")
        self.x, self.order = x, order
        self.directions = Directions(x.shape[-2] * x.shape[-1], x.device)
        self._head = network.head
        self.spots: list[Spot] = []
        self._values(network)
        self._jets()
        self._passages()

    # -- values, and the local error of each

    def _values(self, network: Network) -> None:
        u = self.x
        for stage in network.stages:
            pieces = stage.pieces if isinstance(stage, Residual) else (stage,)
            v = u
            for k, piece in enumerate(pieces):
                residual = isinstance(stage, Residual)
                spot = Spot(piece, v, self._local(piece, v), residual and k == 0, residual and k == len(pieces) - 1)
                out = piece.value(Ball.exact(v))
                v, defect = out.mid, frobenius_upper(out.rad)
                if spot.joins:
                    total = Ball.exact(u) + v
                    v, defect = total.mid, defect + frobenius_upper(total.rad)
                spot.defects.append(defect)
                self.spots.append(spot)
            u = v
        self.features = u

    def _local(self, piece: Piece, u: Tensor) -> Local | None:
        if isinstance(piece, Attention):
            return LocalAttention(piece, u, self.directions, self.order)
        if isinstance(piece, Mlp):
            return LocalPerceptron(piece, u, self.directions, self.order)
        if isinstance(piece, Normalisation):
            return LocalNormalisation(piece, u, self.directions, self.order)
        return None

    # -- jets

    def _jets(self) -> None:
        b, n, d = self.x.shape
        p, order = self.directions.p, self.order
        unit = torch.eye(p, dtype=torch.float64, device=self.x.device).reshape(p, 1, n, d).expand(p, b, n, d)
        self.slopes = self._logits(self._walk(unit, 1))
        self.bends = self._logits(self._walk(None, 2))
        if order == 3:
            chunk = max(64, _CHUNK // (b * max(spot.u.shape[-2] * spot.u.shape[-1] for spot in self.spots)))
            self.twists = torch.cat([self._logits(self._walk(None, 3, at)) for at in self.directions.triples(chunk)])
        for spot in self.spots:
            if spot.curved is not None:
                own = spot.curved.defects()
                spot.defects = [spot.defects[0], *(x + y for x, y in zip(own, spot.defects[1:], strict=True))]

    def _walk(self, jets: Tensor | None, k: int, at: Triples | None = None) -> Tensor:
        """Jets of degree k at the features; None stands for zero, up to the first curved piece."""
        count = None if k == 1 else self.directions.pair_count if at is None else at.count
        stream = jets
        for spot in self.spots:
            lost: Tensor | float = 0.0
            if spot.forks:
                stream = jets
            if spot.curved is not None:
                if jets is None:
                    assert count is not None
                    jets = spot.u.new_zeros(len(count), *spot.u.shape)
                jets = spot.curved.jets(k, jets, at)
            elif jets is not None:
                jets, lost = self._through_linear(spot, jets, count)
            if spot.joins and stream is not None:
                assert jets is not None
                jets = stream + jets
                lost = lost + 2 * UNIT * _length(jets, count)
            self._lose(spot, k, lost)
        if jets is None:
            assert count is not None
            return self.features.new_zeros(len(count), *self.features.shape)
        return jets

    def _through_linear(self, spot: Spot, jets: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        assert isinstance(spot.piece, LinearPiece)
        out = spot.piece.push(Ball.exact(spot.u), Ball.exact(jets))
        return out.mid, _length(out.rad, count)

    def _lose(self, spot: Spot, k: int, lost: Tensor | float) -> None:
        """Adds to the spot's defect of degree k; parts of one stack of jets add in squares, here simply."""
        factorial = (1, 1, 2, 6)[k]
        amount = torch.zeros_like(spot.defects[0]) + lost / factorial
        if len(spot.defects) <= k:
            spot.defects.append(amount)
        else:
            spot.defects[k] = spot.defects[k] + amount

    def _logits(self, jets: Tensor) -> Tensor:
        return jets.squeeze(-2) @ self._head.weight.to(jets).mT

    # -- Jacobians in between

    def _passages(self) -> None:
        """All passages; sources are taken from the last to the first, so that their own errors are known."""
        self.passages: list[dict[int, Passage]] = [{} for _ in self.spots]
        self._ends: dict[int, Passage] = {}
        y = self._head.logits(self.features).argmax(-1)
        for source in reversed(range(len(self.spots))):
            self._ends[source] = self._passage(source, y)

    def _passage(self, source: int, y: Tensor) -> Passage:
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
                error = self._error(k, lost)
                self.passages[source][k] = self._measure(columns, (m, d), scale, error)
            if spot.forks:
                stream, inside = columns, False
            if spot.curved is None:
                columns, size = self._through_linear(spot, columns, None)
            else:
                size = spot.curved.theta * spot.curved.push_size() * _length(columns, None)
                columns = spot.curved.push(columns)
            if spot.joins:
                if not inside:
                    columns = stream + columns
                    size = size + 2 * UNIT * _length(columns, None)
                inside = False
            lost.append((k, size))
        return self._to_margins(columns, (m, d), scale, y, self._error(len(self.spots), lost))

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
            elif k == target - 1:
                total = total + size
            else:
                total = total + size * self.passages[k][target].whole
        return total

    def _measure(self, columns: Tensor, shape: tuple[int, int], scale: Tensor | None, error: Tensor) -> Passage:
        """Norms of the Jacobian whose columns (m d, b, n, c) belong to the tokens and channels of the source."""
        m, d = shape
        whole = (_length(columns, None) + error) * (1 + 1e-12)
        S = columns.unflatten(0, (m, d)).permute(2, 3, 0, 1, 4)  # (b, i, i', d, c)
        size = error
        if scale is not None:
            S = S * scale.reshape(-1, 1)
            size = error * scale.abs().amax()
        small = S.shape[-1] <= S.shape[-2]
        gram = S.mT @ S if small else S @ S.mT
        lengths = torch.linalg.matrix_norm(S).square()
        blocks = gram_norm(gram, gamma(max(S.shape[-2:])) * lengths * 2, 1) + size[:, None, None]
        rows = S.permute(0, 1, 4, 2, 3).flatten(-2, -1)  # (b, i, c, i' d)
        over = rows @ rows.mT
        row_norm = gram_norm(over, gamma(rows.shape[-1]) * lengths.sum(-1) * 2, 2) + size[:, None]
        return Passage(blocks * (1 + 1e-12), row_norm * (1 + 1e-12), whole)

    def _to_margins(
        self, columns: Tensor, shape: tuple[int, int], scale: Tensor | None, y: Tensor, error: Tensor
    ) -> Passage:
        m, d = shape
        whole = (_length(columns, None) + error) * (1 + 1e-12)
        W = self._head.weight.to(columns)
        rows = W[y].unsqueeze(-2) - W  # (b, classes, d)
        lengths = torch.linalg.vector_norm(rows, dim=-1) * (1 + 1e-12)
        S = torch.einsum("tbc,bjc->bjt", columns.squeeze(-2), rows).unflatten(-1, (m, d))
        slack = (error + whole * gamma(2 * W.shape[-1] + 8)).unsqueeze(-1) * lengths
        if scale is not None:
            S, slack = S * scale, slack * scale.abs().amax()
        blocks = torch.linalg.vector_norm(S, dim=-1) + slack.unsqueeze(-1)
        return Passage(blocks * (1 + 1e-12), lengths, whole)

    # -- what a radius leaves

    def left_out(self, eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b classes"]:
        """A bound of what the polynomials of the margins f_y - f_j leave out, for every j."""
        total: Tensor = torch.zeros_like(self._ends[0].rows)
        carried: list[tuple[int, Tensor | None, Tensor]] = []
        for k, spot in enumerate(self.spots):
            r = None
            if spot.curved is not None:
                F = torch.zeros_like(spot.u[..., 0])
                for source, rest, defect in carried:
                    passage = self.passages[source][k]
                    F = F + (passage.whole * defect).unsqueeze(-1)
                    if rest is not None:
                        F = F + passage.carry(rest)
                r = spot.curved.rest(F * (1 + 1e-10), eps)
            defect = sum(lost * eps**degree for degree, lost in enumerate(spot.defects)) * (1 + 1e-10)
            carried.append((k, r, defect))
            end = self._ends[k]
            total = total + (end.whole * defect).unsqueeze(-1) * end.rows
            if r is not None:
                total = total + (end.blocks @ r.unsqueeze(-1)).squeeze(-1)
        return total * (1 + 1e-10)


def _length(jets: Tensor, count: Tensor | None) -> Tensor:
    """(b) the Frobenius norm of jets (t, b, n, d), each counted as often as it stands for."""
    squares = jets.square().sum((-2, -1))
    if count is not None:
        squares = squares * count.unsqueeze(-1)
    return squares.sum(0).sqrt() * (1 + 1e-12)
