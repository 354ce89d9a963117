"""Functions that follow from the residual stream: first order forwards, and what is beyond as a length of every token.

    δ_s = J_s b + F_s,    ‖F_s,i‖ <= φ_s,i

in front of every stage s (docs/math/forms.md, section 12). Time and memory grow in proportion to the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.compositions.forms.derived import Derived
from holdfast.compositions.forms.local import THETA, UNDERFLOW, Rests, Size, SmoothLocal, token_lengths
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.passing import Passing, UnitsPassing, passing
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.single import NormalisedTokens, TokenMoves
from holdfast.compositions.forms.smooth import SmoothUnits
from holdfast.compositions.forms.softmax import Softmax
from holdfast.compositions.forms.walk import CentreWalk, Covectors
from holdfast.layers.piece import LinearPiece
from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma, up
from holdfast.linalg.squarings import thin_gram_norm
from holdfast.usage import give_back_memory

_CHUNK = 2**22  # numbers that are pushed together
_SOURCES = 2**28  # numbers of derivatives between stages that are kept; from there on one stage after the other
_SQUARINGS = 1  # of the blocks' inner products: thousands of blocks
_FEW = 0.25  # of all tokens, up to which it costs less to pull what matters behind a branch
_ROOM = 2**24  # numbers of rows of a place that are kept


#: Tangents (k, n, d) behind a stage, and what they were rounded by.
_Push = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _BranchBegin:
    """A normalisation that takes the stream: its tokens, lengths of the stream's rows there, and its own rounding."""

    norm: Normalised
    tokens: NormalisedTokens
    stream: Tensor
    behind: Passing | None
    derived: Derived | None


@dataclass(frozen=True)
class _Rounding:
    """What rounding adds to the rest of the stream at a stage: always, and for ‖b‖ = 1."""

    still: float
    drift: float


@final
@dataclass
class _StreamSource:
    """What the stream has gained in front of a stage since the last source, and what becomes of that later on.

    Attributes:
        stage: the one.
        tokens: (t) where.
        D: (t d, n, d) the derivative from there to the stream that was reached last, as it was computed.
        norms: of D's blocks in front of every later stage, (n, t).
        lost: bounds of what rounding did to D at each of these.
    """

    stage: int
    tokens: Tensor
    D: Tensor
    norms: dict[int, Tensor]
    lost: dict[int, float]


@final
class Stream:
    """The places of a network of pre-normalised branches, for sums of suprema over a ball.

    Args:
        walk: the network at its centre.
        region: what may be perturbed.
        margins: pulled back.
        tokens: of every place's output, those that matter.
        in_time: gives up what would take too long.

    Attributes:
        prepared: what every place has prepared of the margins.
        first: first-order rows of the functions of places that have few.
    """

    def __init__(
        self,
        walk: CentreWalk,
        region: Region,
        margins: Covectors,
        tokens: dict[int, Tensor],
        in_time: Callable[[], None],
    ) -> None:
        self._walk, self._region, self._margins, self._tokens, self._in_time = walk, region, margins, tokens, in_time
        self.prepared: dict[int, Any] = {}
        self.first: dict[int, Tensor] = {}
        self._entered: dict[int, _BranchBegin] = {}  # by the place of the normalisation
        self._rounding: list[_Rounding] = []
        self._sources: list[_StreamSource] = []
        self._merged: list[int] = []  # stages where all that came before is one source
        self._links: dict[int, Tensor] = {}  # of affine stages, which tokens depend on which
        T = region.J.mT.reshape(region.p, *walk.start.shape)
        for stage in range(len(walk.stages)):
            T = self._through(T, stage)
        for source in self._sources:
            source.D = T.new_zeros(0)

    @staticmethod
    def carries(walk: CentreWalk, region: Region) -> bool:
        """Whether the network is made of such stages, and the region is a ball."""

        def alone(members: list[int]) -> bool:
            return len(members) == 1 and isinstance(walk.places[members[0]].piece, LinearPiece)

        def branch(members: list[int]) -> bool:
            pair = [walk.places[i].local for i in members]
            return len(pair) == 2 and isinstance(pair[0], Normalised) and isinstance(pair[1], Softmax | SmoothUnits)

        stages = [(members, skip) for members, skip, _ in walk.stages if skip or not alone(members)]
        if stages and not stages[-1][1] and isinstance(walk.places[stages[-1][0][0]].local, Normalised):
            stages.pop()  # the last normalisation, of which nothing follows but margins
        return region.sides is None and all(skip and branch(members) for members, skip in stages)

    @staticmethod
    def memory(walk: CentreWalk, region: Region) -> float:
        """Bytes of the largest place's rows, twice, of tangents, and of sources."""
        widest = max(place.u.numel() for place in walk.places)
        rows = 2 * max(walk.local(i).scalars for i in walk.curved) + 5 * widest
        later = sum(
            isinstance(walk.local(i), Softmax) for i in walk.curved[2:]
        )  # attention, each with a source before it
        sources = min(later * widest**2, _SOURCES + widest**2) + widest**2
        return 8.0 * (rows * region.p + sources)

    # -- first order

    def _through(self, T: Tensor, stage: int) -> Tensor:
        """Rows J (p, n, d) of the stream behind a stage, from those before it; none behind the last normalisation."""
        members, skip, join = self._walk.stages[stage]
        i, place = members[0], self._walk.places[members[0]]
        if not isinstance(place.local, Normalised):
            return self._through_linear(T, stage) if len(T) else T
        norm = place.local
        stream = up(torch.linalg.vector_norm(T, dim=(0, 2)), 1e-12)[self._tokens[i]]
        norm.covectors(self._tokens[i])
        self._place(i, norm, self._rows(norm, T))
        tokens = norm.single_tokens()
        if skip:
            k = members[1]
            local, defect = self._walk.local(k), self._walk.places[k].defect
            assert isinstance(local, Softmax | SmoothUnits)
            derived = Derived(local, norm, self._tokens[k], place.defect)
            Y, unsure = norm.output_rows()
            Y, unsure = Y.nan_to_num().movedim(-1, 0), torch.linalg.vector_norm(unsure.nan_to_num())
            self._place_behind(k, local, norm, Y)
            behind = passing(local, norm, tokens)
            self._entered[i] = _BranchBegin(norm, tokens, stream, behind, derived)
            T, lost = self._added(T, Y, local)
            del Y
            if isinstance(behind, UnitsPassing):
                self._follow(stage, lambda D: _by_blocks(D, behind), T)
            else:
                self._begin(stage, norm.u.shape)
                self._follow(stage, self._branch(norm, local, (tokens.steep, behind.steep), self._tokens[k]), T)
            local.forget()
            start = self._start(behind.steep * tokens.steep) if stage == 0 else (0.0, 0.0)
            still, drift = behind.steep * place.defect + defect + join, behind.steep * float(unsure) + lost
            self._rounding.append(_Rounding(up(still + start[0], 1e-9), up(drift + start[1], 1e-9)))
            self._known_tokens = self._tokens[k]
        else:
            T = T.new_zeros(0)
            self._entered[i] = _BranchBegin(norm, tokens, stream, None, None)
        norm.forget()
        give_back_memory()
        return T

    def _start(self, steep: float) -> tuple[float, float]:
        """What the rounding of the beginning becomes behind the first stage."""
        return (1 + steep) * self._walk.start_defect, (1 + steep) * self._region.missed

    def _branch(self, norm: Normalised, local: SmoothLocal, steeps: tuple[float, float], tokens: Tensor) -> _Push:
        """What a branch makes of tangents: by pushing them or, where few tokens matter behind it, by pulling those."""
        (n, d), (before, steep) = norm.u.shape, steeps

        def push(D: Tensor) -> tuple[Tensor, Tensor]:
            Y, first = norm.push(D)
            Z, second = local.push(Y)
            out = D + Z
            return out, steep * first + second + 2 * UNIT * token_lengths(out)

        if len(tokens) > _FEW * n:
            return push
        C = torch.eye(n * d, dtype=torch.float64).reshape(n, d, n, d)[tokens].flatten(0, 1)
        back, first = local.pull(C)
        through, second = norm.pull(back)
        rows = (C + through).flatten(1)
        summed = up(torch.linalg.matrix_norm(rows), 1e-9) * gamma(n * d + 1)
        off = float(summed) + before * torch.linalg.vector_norm(first) + torch.linalg.vector_norm(second)

        def pulled(D: Tensor) -> tuple[Tensor, Tensor]:
            out = D.new_zeros(D.shape)
            out[:, tokens] = (D.flatten(1) @ rows.mT).reshape(len(D), len(tokens), d)
            return out, token_lengths(D) * off

        return pulled

    def _begin(self, stage: int, shape: torch.Size) -> None:
        """What was added since the last source becomes one; of the start there is nothing but rounding."""
        if stage == 0:
            return
        n, d = shape
        if sum(source.D.numel() for source in self._sources) > _SOURCES:
            for source in self._sources:
                source.D = source.D.new_zeros(0)
            self._merged.append(stage)
        D = torch.eye(n * d, dtype=torch.float64).reshape(n, d, n, d)[self._known_tokens].flatten(0, 1)
        self._sources.append(_StreamSource(stage, self._known_tokens, D, {}, {}))

    def _follow(self, stage: int, push: _Push, T: Tensor) -> None:
        """All sources through a stage."""
        n, d = T.shape[1:]
        for source in self._sources:
            if not source.D.numel():
                continue
            parts = []
            out = torch.empty(len(source.D), n, d, dtype=torch.float64)
            for some in self._parts(source.D):
                self._in_time()
                out[some], lost = push(source.D[some])
                parts.append(lost)
            source.D, source.lost[stage + 1] = out, up(float(torch.linalg.vector_norm(torch.cat(parts))), 1e-9)
            blocks = out.reshape(len(source.tokens), -1, n, d).permute(2, 0, 1, 3)
            source.norms[stage + 1] = torch.stack([_block_norms(row) for row in blocks])

    def _rows(self, local: SmoothLocal, T: Tensor) -> Tensor:
        """(K, p) first-order rows of a place's functions."""
        rows = torch.empty(0, len(T), dtype=torch.float64)
        for some in self._parts(T):
            self._in_time()
            new = local.functions(T[some])
            rows = rows if len(rows) else torch.empty(len(new), len(T), dtype=torch.float64)
            rows[:, some] = new
        return rows

    def _parts(self, T: Tensor) -> tuple[Tensor, ...]:
        return torch.split(torch.arange(len(T)), max(1, _CHUNK // T[0].numel()))

    def _place(self, i: int, local: Normalised | Softmax | SmoothUnits, rows: Tensor) -> None:
        if rows.numel() <= _ROOM:
            self.first[i] = rows
        local.place(rows, self._region.supremum(rows))
        if i in self._margins.at:
            self.prepared[i] = local.prepare(self._margins.at[i])

    def _place_behind(self, k: int, local: Softmax | SmoothUnits, norm: Normalised, Y: Tensor) -> None:
        """Units that are too many have no rows: their lengths follow from inner products of the normalisation's."""
        if isinstance(local, Softmax) or local.scalars * len(Y) <= _ROOM:
            self._place(k, local, self._rows(local, Y))
            return
        read, (gram, length) = local.wiring.read(), norm.output_gram()
        sizes = frobenius_upper(read, (-1,)) * length.unsqueeze(-1)  # (t, U)
        squares = ((read @ gram) * read).sum(-1).clamp(min=0.0) + 64 * THETA * sizes.square()
        local.place(Y.new_zeros(0, len(Y)), up(squares.sqrt() * self._region.radius, 1e-9).flatten())
        if k in self._margins.at:
            self.prepared[k] = local.prepare(self._margins.at[k])

    def _added(self, T: Tensor, Y: Tensor, local: SmoothLocal) -> tuple[Tensor, float]:
        """The stream behind a branch whose last place takes Y, and what that was rounded by."""
        out, lost = torch.empty_like(T), []
        for some in self._parts(T):
            self._in_time()
            pushed, error = local.push(Y[some])
            out[some] = T[some] + pushed
            lost.append(error + 2 * UNIT * token_lengths(out[some]))
        return out, float(torch.linalg.vector_norm(torch.cat(lost)))

    def _through_linear(self, T: Tensor, stage: int) -> Tensor:
        place = self._walk.places[self._walk.stages[stage][0][0]]
        assert isinstance(place.piece, LinearPiece)
        piece = place.piece

        def push(D: Tensor) -> tuple[Tensor, Tensor]:
            out = piece.push(Ball.exact(place.u), Ball.exact(D))
            return out.mid, frobenius_upper(out.rad)

        out, lost = push(T)
        n, d = out.shape[1:]
        self._rounding.append(_Rounding(place.defect, up(float(torch.linalg.vector_norm(lost)), 1e-9)))
        self._begin(stage, place.u.shape)
        self._follow(stage, push, out)
        C = torch.eye(n, dtype=torch.float64).unsqueeze(-1) * torch.arange(1, d + 1).double().sin()
        self._links[stage] = (piece.pull(Ball.exact(place.u), Ball.exact(C)).mid != 0).any(-1)
        self._known_tokens = torch.arange(n)
        return out

    # -- at a scale

    def begin(self, size: Size) -> None:
        """A new scale, from the first place on."""
        start = up(self._region.missed * size.scale + self._walk.start_defect, 1e-12) + UNDERFLOW
        self._radius, self._carried, self._new = size.radius, dict[int, tuple[Tensor, Tensor]](), dict[int, Tensor]()
        self._phi = [torch.full((len(self._walk.start),), start, dtype=torch.float64)]

    def rests(self, i: int, moved: float) -> Rests:
        """What a place's functions have beyond first order."""
        if i in self._entered:
            entered, phi = self._entered[i], self._at(i)
            tokens, d = entered.tokens, len(entered.tokens.scale)
            carried, tiny = tokens.carried(phi[tokens.tokens], entered.stream, self._radius, moved)
            most, small = (torch.cat([x.repeat_interleave(d), x]) for x in (up(carried + tiny, 1e-12), tiny))
            self._carried[i] = carried, tiny
            return Rests(most, most, small, together=up(carried + tiny, 1e-12))
        entered = self._entered[i - 1]
        assert entered.derived is not None
        assert entered.behind is not None
        return entered.derived.rests(self._radius, moved, entered.behind.functions(self._known(i - 1)))

    def _known(self, i: int) -> TokenMoves:
        """What is known of a normalisation that has been settled."""
        return self._entered[i].norm.moves(*self._carried[i])

    def _at(self, i: int) -> Tensor:
        """φ in front of the stage of a place, when all earlier ones have been settled."""
        stage = next(k for k, (members, _, _) in enumerate(self._walk.stages) if i in members)
        while len(self._phi) <= stage:
            self._phi.append(self._next(len(self._phi) - 1))
        return self._phi[stage]

    def _next(self, stage: int) -> Tensor:
        """φ behind a stage that has been settled: what was added since the last source, and what became of others."""
        (i, *_), rounding, before = self._walk.stages[stage][0], self._rounding[stage], self._phi[stage]
        new = torch.zeros(len(self._walk.places[self._walk.stages[stage + 1][0][0]].u), dtype=torch.float64)
        if i in self._entered:
            behind = self._entered[i].behind
            assert behind is not None
            new = behind.added(self._known(i))
            if isinstance(behind, UnitsPassing) and stage > 0:
                new = new + behind.grown * self._new[stage]
        else:
            new[(self._links[stage] & torch.isnan(before)).any(-1)] = torch.nan
        here = [source for source in self._sources if stage + 1 in source.lost]
        new = new + rounding.still + rounding.drift * self._radius + UNDERFLOW
        for source in here:
            new = new + source.lost[stage + 1] * torch.linalg.vector_norm(self._gained(source))
        new = up(new, 1e-9)
        self._new[stage + 1] = new
        for source in here:
            new = new + source.norms[stage + 1] @ self._gained(source)
        phi: Tensor = up(new, 1e-9)
        return phi

    def _gained(self, source: _StreamSource) -> Tensor:
        """(t) what the stream had gained in front of a source's stage."""
        gained: Tensor = self._phi[source.stage] if source.stage in self._merged else self._new[source.stage]
        return gained[source.tokens]


def _by_blocks(D: Tensor, behind: UnitsPassing) -> tuple[Tensor, Tensor]:
    """Tangents through a branch of units, token by token."""
    out = torch.einsum("knd,ned->kne", D, behind.blocks)
    size = up(float(torch.linalg.matrix_norm(behind.blocks).amax()), 1e-9)
    return out, token_lengths(D) * (behind.off + gamma(D.shape[-1]) * size)


def _block_norms(blocks: Tensor) -> Tensor:
    """(t) the norms of blocks (t, d, d'); 0 of those that vanish."""
    return thin_gram_norm(blocks, _SQUARINGS) * (blocks != 0).any(-1).any(-1)
