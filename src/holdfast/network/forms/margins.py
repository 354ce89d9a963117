"""Margins of a network over a ball or a box, from below (docs/math/forms.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.bounds.arithmetic import Proved
from holdfast.errors import InputError, MemoryLimitError, NotApplicableError
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import up
from holdfast.network.attention import Attention
from holdfast.network.base import LinearPiece
from holdfast.network.forms.kinks import KinkedPerceptron, jump
from holdfast.network.forms.least import least
from holdfast.network.forms.local import LONGEST, Local, Problem, Size
from holdfast.network.forms.region import Region
from holdfast.network.forms.softmax import Softmax
from holdfast.network.forms.walk import Covectors, Place, Walk
from holdfast.network.mlp import KinkedMlp
from holdfast.network.network import Network

_MEMORY = 4 * GIB
_BUDGET = 1e11  # products for what a batch of covectors turns by
_STEPS = 8  # improvements of the kinks' parameters


def refusal(network: Network) -> str | None:
    """Names what has no forms, or None."""
    for piece in network.pieces():
        if isinstance(piece, LinearPiece):
            continue
        if isinstance(piece, Attention):
            if piece.layer.rotary is not None:
                return "Attention with rotary positions has no forms"
        elif not (isinstance(piece, KinkedMlp) and jump(piece.activation) is not None):
            return f"{type(piece).__name__} has no forms"
    return None


@final
@dataclass(frozen=True)
class Lower:
    """Lower bounds of the margins over a region.

    Attributes:
        margins: (classes) of f_y - f_j; infinite for j = y.
        least: the smallest of them.
        losses: of the margin that is smallest, what was taken off its value at the centre, by name.
    """

    margins: Tensor
    least: float
    losses: dict[str, float]


@dataclass(frozen=True)
class _Batch:
    """Covectors at the outputs of some places: what each place has prepared of them, and how they turn (S, M)."""

    prepared: dict[int, Any]
    turning: dict[int, Tensor]


@final
class Margins:
    """The margins at one input.

    Args:
        network: the classifier.
        x: (n, d) float64, the centre.
        shape: (n, d) half-widths of a box; None for an l2 ball.

    Attributes:
        walk: the places of the network.
        region: what may be perturbed.
        functions: the scalars of every place that is not affine, pulled back, and what they were rounded by.
        tokens: for every place that is not affine, the tokens of its output on which a margin depends.
        beyond: for the same, at the last scale: its functions lie between -low and high of their first order.
    """

    def __init__(
        self, network: Network, x: Float64[Tensor, "n d"], shape: Float64[Tensor, "n d"] | None = None
    ) -> None:
        reason = refusal(network)
        if reason is not None:
            raise NotApplicableError(f"{network.name} has no forms: {reason}")
        self._seen: dict[float, Lower] = {}
        self._norms: dict[LinearPiece, float] = {}
        with torch.no_grad():
            self.walk = walk = Walk(network, x.double())
            half = None if shape is None else shape.double().flatten()
            _check_size(walk)
            self.region = Region.of(walk.beginning(), half)
            for i in walk.curved:
                walk.places[i].local = _local(walk.places[i])
            self._margins = walk.pulled(walk.rows, len(walk.places), self.region)
            self._pull_functions()
            self._prepare()

    @property
    def prediction(self) -> int:
        return self.walk.prediction

    @property
    def gradients(self) -> Tensor:
        """(classes - 1, p) of the margins, in the region's coordinates."""
        return self._margins.X

    def _pull_functions(self) -> None:
        """From the last place to the first, so that each knows which of its output's tokens matter."""
        self.functions: dict[int, tuple[Covectors, Tensor]] = {}
        self.tokens: dict[int, Tensor] = {}
        self.beyond: dict[int, tuple[Tensor, Tensor]] = {}
        batches = [self._margins]
        for i in reversed(self.walk.curved):
            local = self._local(i)
            seen = torch.stack([(batch.at[i] != 0).any(-1).any(0) for batch in batches if i in batch.at]).any(0)
            self.tokens[i] = seen.nonzero().squeeze(-1)
            C, error = local.covectors(self.tokens[i])
            found = self.walk.pulled(C, i, self.region)
            self.functions[i] = found, error
            batches.append(found)

    def _prepare(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._each: dict[int, _Batch] = {}
        self._bends: dict[int, _Batch | None] = {}
        for i in self.walk.curved:
            functions, _ = self.functions[i]
            self._batches[i] = self._batch(functions.at)
            local = self._local(i)
            local.place(functions.X, self.region.supremum(functions.X))
            if isinstance(local, Softmax):
                self._each[i] = self._batch({i: local.identity()})
                bent = local.bent(self._seen_at(i), _BUDGET) if functions.at else None
                self._bends[i] = None if bent is None else _Batch({}, bent)
        self._slopes = self.region.supremum(self._margins.X)
        self._ends = self._batch(self._margins.at)

    def _batch(self, at: dict[int, Tensor]) -> _Batch:
        """Covectors at the outputs of some places, prepared; with how they turn, where that is affordable."""
        prepared = {k: self._local(k).prepare(mu) for k, mu in at.items()}
        turning: dict[int, Tensor] = {}
        for i, rows in prepared.items():
            local = self._local(i)
            if isinstance(local, Softmax) and self.functions[i][0].at:
                turned = local.turned(rows, self._seen_at(i), _BUDGET)
                if turned is not None:
                    rows.turned = True
                    for k, norms in turned.items():
                        turning[k] = turning[k] + norms if k in turning else norms
        return _Batch(prepared, turning)

    def _seen_at(self, i: int) -> dict[int, tuple[Tensor, float]]:
        """What counts of the functions of a place, at all earlier ones."""
        return {k: self._local(k).seen(mu) for k, mu in self.functions[i][0].at.items()}

    def _local(self, i: int) -> Local:
        local = self.walk.places[i].local
        assert local is not None
        return local

    # -- at a scale

    def at(self, scale: float) -> Lower:
        """Lower bounds of the margins over the region of this scale."""
        if scale not in self._seen:
            with torch.no_grad():
                self._seen[scale] = self._lower(scale, self._settle(scale))
        return self._seen[scale]

    def _settle(self, scale: float) -> Tensor:
        """Bounds of ‖δ‖ at all places, and at the features; every local learns of the scale."""
        size = Size.of(self.region, scale)
        moved = torch.zeros(len(self.walk.places) + 1, dtype=torch.float64)
        u = self.region.reach * scale + self.walk.start_defect
        for members, skip, join in self.walk.stages:
            v = u
            for i in members:
                moved[i] = v
                place = self.walk.places[i]
                v = (
                    v * self._norm(place.piece)
                    if isinstance(place.piece, LinearPiece)
                    else self._settle_one(i, size, moved)
                )
                v = (v + place.defect) * (1 + 1e-12)
            u = (u + v + join) * (1 + 1e-12) if skip else v
        moved[-1] = u
        return moved

    def _norm(self, piece: LinearPiece) -> float:
        if piece not in self._norms:
            a = Proved()
            self._norms[piece] = float(a.number(piece.norm(a)))
        return self._norms[piece]

    def _settle_one(self, i: int, size: Size, moved: Tensor) -> float:
        functions, error = self.functions[i]
        tiny = (functions.tiny(size.scale, moved[:-1]) + error * moved[i]) * (1 + 1e-12)
        below, above = self._ranges(self._batches[i], size.radius)
        self.beyond[i] = low, high = (tiny + below) * (1 + 1e-10), (tiny + above) * (1 + 1e-10)
        local = self._local(i)
        if isinstance(local, Softmax) and (bends := self._bends[i]) is not None:
            local.bending = self._ranges(bends, size.radius)[0]
        moves = local.settle(size, low, high, tiny, float(moved[i]))
        if isinstance(local, Softmax):
            local.each = self._ranges(self._each[i], size.radius)[0]
        return moves

    def _ranges(self, batch: _Batch, radius: float) -> tuple[Tensor, Tensor]:
        """What the rests of all earlier places add to the functions of a batch, from -low to high."""
        low = high = torch.zeros((), dtype=torch.float64)
        for i in batch.prepared.keys() | batch.turning.keys():
            varying = batch.turning[i] * radius if i in batch.turning else None
            below, above = self._local(i).range(batch.prepared.get(i), varying)
            low, high = low + below, high + above
        return low, high

    def _lower(self, scale: float, moved: Tensor) -> Lower:
        """The margins in order of a cheap bound; a trust-region problem for those that it leaves in question."""
        walk = self.walk
        tiny = (self._margins.tiny(scale, moved[:-1]) + walk.row_error * moved[-1]) * (1 + 1e-12)
        first = self._slopes * scale
        radius = Size.of(self.region, scale).radius
        lost = tiny + first + self._ranges(self._ends, radius)[0]
        cheap = walk.margins - lost * (1 + 1e-10) - walk.margins.abs() * 1e-15
        cheap = cheap.nan_to_num(nan=-math.inf)
        margins = torch.full((len(walk.others) + 1,), math.inf, dtype=torch.float64)
        margins[walk.others] = cheap
        worst, losses = math.inf, {"first order": float(first.amax())}
        for s in cheap.argsort().tolist():
            if float(cheap[s]) >= worst or worst <= 0:
                break
            problem = Problem.of(float(walk.margins[s]), self._margins.X[s])
            problem.lose("rounding", float(tiny[s]))
            for i, prepared in self._ends.prepared.items():
                varying = self._ends.turning[i][s] * radius if i in self._ends.turning else None
                self._local(i).take(prepared, s, problem, varying)
            found, point = least(problem, self.region, scale, _STEPS)
            found = max(found, float(cheap[s]))
            margins[walk.others[s]] = found
            if not found >= worst:
                worst, losses = found, problem.breakdown(point, float(walk.margins[s]) - found)
        return Lower(margins, worst, losses)


def margins_over_box(network: Network, lower: Float64[Tensor, "n d"], upper: Float64[Tensor, "n d"]) -> Lower:
    """Lower bounds of all margins over the box between `lower` and `upper`, expanded around its middle.

    Args:
        network: the classifier.
        lower: (n, d) lower ends of the input's coordinates.
        upper: (n, d) upper ends; equal to the lower ones for a coordinate that is fixed.
    """
    if lower.shape != upper.shape or lower.ndim != 2 or not bool((lower <= upper).all()):
        raise InputError(
            f"lower has shape {tuple(lower.shape)} and upper {tuple(upper.shape)}; expected (n, d) with lower <= upper"
        )
    low, high = lower.double(), upper.double()
    middle = (low + high) / 2
    half = torch.maximum(high - middle, middle - low)
    return Margins(network, middle, shape=torch.where(half > 0, up(half), half)).at(1.0)


def _local(place: Place) -> Local:
    if isinstance(place.piece, Attention):
        return Softmax(place.piece, place.u)
    assert isinstance(place.piece, KinkedMlp)
    return KinkedPerceptron(place.piece, place.u)


def _check_size(walk: Walk) -> None:
    """Refuses what would not fit: a covector of a whole place for each of its scalars."""
    for i in walk.curved:
        n, d = walk.places[i].u.shape
        piece = walk.places[i].piece
        layer = piece.layer if isinstance(piece, Attention) else None
        scalars = n * (3 * d + layer.h * n) if layer is not None else n * 4 * d
        if max(n * d, scalars if layer is None else layer.h * n * n) > LONGEST:
            raise MemoryLimitError(
                f"forms takes inner products of {LONGEST} terms; a piece with {n} x {d} numbers has more"
            )
        need = 8.0 * 4 * scalars * n * d
        if need > _MEMORY:
            raise MemoryLimitError(
                f"forms follows {scalars} scalars of {n} x {d} numbers each and needs about {need / GIB:.1f} GiB; "
                f"it takes at most {_MEMORY / GIB:.0f} GiB: use gains, or perturb a later layer"
            )
