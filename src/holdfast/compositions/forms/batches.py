"""Covectors of every place's functions, and what all earlier places have prepared of them: once for all scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from holdfast.compositions.forms.derived import Derived
from holdfast.compositions.forms.jets import Jets
from holdfast.compositions.forms.local import Rests
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.stream import Stream
from holdfast.compositions.forms.walk import CentreWalk, Covectors
from holdfast.errors import MemoryLimitError, SoundnessError
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import frobenius_upper, up
from holdfast.usage import give_back_memory

_CHUNK = 2**18  # numbers of covectors that are treated together
_ROOM = 2**23  # numbers of covectors at earlier places that are kept beside jets, about; others are made anew
_NUMBERS = 6e8  # of covectors at earlier places, beyond which functions are derived from normalisations
_MOST = 10 * GIB
_MEMORY = _MOST  # of covectors, beyond which functions follow from the stream
_VAST = 2**13  # rows of one place, of whose inner products several matrices would be needed
_BUDGET = 2e10  # products for what a batch of covectors turns by


@final
@dataclass(frozen=True)
class BatchPart:
    """Some covectors at the outputs of some places: what each place has prepared of them, and how they turn (S, M)."""

    count: int
    prepared: dict[int, Any]
    turning: dict[int, Tensor]


@final
class Batches:
    """The functions of all places, pulled back, and prepared by all earlier ones.

    Args:
        walk: the network at its centre.
        region: what may be perturbed.
        margins: pulled back.
        in_time: gives up what would take too long.

    Attributes:
        tokens: for every place that is not affine, the tokens of its output on which a margin depends.
        functions: the scalars of every such place, pulled back, and what they were rounded by.
        derived: places whose functions follow from those of a normalisation, where all functions are too many.
        suprema: of their first order, for scale 1.
        jets: the second and third orders of all places together, where that is affordable.
        outputs: for attention whose covectors vary, the coordinates of its output.
        bends: for attention, how the bilinear part of its logits varies with earlier rests.
        ends: the margins.
    """

    def __init__(self, walk: CentreWalk, region: Region, margins: Covectors, in_time: Callable[[], None]) -> None:
        self._walk, self._region, self._in_time = walk, region, in_time
        self.tokens: dict[int, Tensor] = {}
        self.functions: dict[int, tuple[Covectors, Tensor]] = {}
        self.derived: dict[int, Derived] = {}
        self.suprema: dict[int, Tensor] = {}
        self._parts: dict[int, list[BatchPart | None]] = {}  # of these functions; None for one that is made anew
        self.outputs: dict[int, list[BatchPart]] = {}
        self.bends: dict[int, list[BatchPart]] = {}
        self._sights: dict[int, dict[int, tuple[Tensor, float]]] = {}
        self._find_tokens(margins)
        self._margins = margins.without_places()
        self.jets = Jets(walk, region, in_time) if Jets.affordable(walk, region) else None
        self.stream: Stream | None = None
        if self.jets is not None:
            self._prepare_with(self.jets)
        else:
            many = self._many()
            need = self._memory(many)
            if need > _MEMORY and Stream.carries(walk, region):
                self._check_memory(Stream.memory(walk, region), _MOST)
                self._check_tokens(margins.at)
                self.stream = Stream(walk, region, margins, self.tokens, in_time)
                self.ends = BatchPart(len(margins), self.stream.prepared, {})
                return
            self._check_memory(need, _MEMORY)
            for i in walk.curved:
                if many and self._follows(i):
                    self._derive(i)
                else:
                    self._prepare(i)
                    if need > GIB:
                        give_back_memory()
        self.ends = self._part(margins.at, len(margins), 1.0)
        self._prepare_outputs()

    def _find_tokens(self, margins: Covectors) -> None:
        """From the last place to the first, which tokens of its output matter: those that some function depends on.

        One covector at every token tells; `_part` sees to it that no other token was missed.
        """
        supports = {i: [(mu != 0).any(-1).any(0)] for i, mu in margins.at.items()}
        for i in reversed(self._walk.curved):
            n, d = self._walk.places[i].u.shape
            matter = torch.stack(supports[i]).any(0)
            matter[0] |= not bool(matter.any())  # one at least, so that nothing is empty
            self.tokens[i] = matter.nonzero().squeeze(-1)
            seen = self._walk.local(i).touched(self.tokens[i])
            C = torch.zeros(len(seen), n, d, dtype=torch.float64)
            C[torch.arange(len(seen)), seen] = torch.arange(1, d + 1).double().sin()
            for k, mu in self._walk.pulled(C, i, self._region).at.items():
                supports.setdefault(k, []).append((mu != 0).any(-1).any(0))

    def _prepare(self, i: int) -> None:
        """The functions of a place, pulled back in parts, and what all earlier places make of each part."""
        local, pulled, sights = self._walk.local(i), [], []
        C, error = local.covectors(self.tokens[i])
        self._parts[i] = []
        for some in C.parts(self._together(i)):
            self._in_time()
            covectors = self._walk.pulled(some, i, self._region)
            self._parts[i].append(self._part(covectors.at, len(some), len(some) / C.count))
            numbers = sum(self._walk.local(k).numbers for k in covectors.at)
            if local.attention is not None and local.attention.turns(numbers, _BUDGET):
                sights.append({k: self._walk.local(k).seen(mu) for k, mu in covectors.at.items()})
            pulled.append(covectors.without_places())
        self._place(i, pulled, error)
        if local.attention is not None:
            self._sights[i] = _joined(sights)
            bent = local.attention.bent(self._sights[i], _BUDGET) if self._sights[i] else None
            if bent is not None:
                self.bends[i] = [BatchPart(len(next(iter(bent.values()))), {}, bent)]

    def _many(self) -> bool:
        """Whether all functions' covectors at all earlier places are more numbers than can be kept."""
        total, before = 0.0, 0
        for i in self._walk.curved:
            local, n = self._walk.local(i), len(self._walk.places[i].u)
            share = 1.0 if local.attention is not None else len(self.tokens[i]) / n
            total += local.scalars * share * before
            before += self._walk.places[i].u.numel() if local.attention is not None else int(local.scalars * share)
        return total > _NUMBERS

    @property
    def vast(self) -> bool:
        """Whether the inner products of all rows of a place, which only sharper bounds need, are too many, or gone."""
        return (
            self.stream is not None or max((self._walk.local(i).longest for i in self._walk.curved), default=0) > _VAST
        )

    def _memory(self, many: bool) -> float:
        """Bytes of first-order rows, and of what earlier places keep of covectors."""
        need, kept = 0.0, 0
        for i in self._walk.curved:
            local = self._walk.local(i)
            share = 1.0 if local.attention is not None else len(self.tokens[i]) / len(self._walk.places[i].u)
            functions = local.scalars * share
            need += functions * (8 * self._region.p + (0 if many and self._follows(i) else kept))
            local.covectors(self.tokens[i])
            kept += local.kept
        return need

    def _check_memory(self, need: float, most: float) -> None:
        """Refuses what would not fit."""
        if need > most:
            raise MemoryLimitError(
                f"forms follows the numbers of {len(self._walk.curved)} places and needs about {need / GIB:.1f} GiB; "
                f"it takes at most {_MOST / GIB:.0f} GiB: use gains, or perturb a later layer"
            )

    def _follows(self, i: int) -> bool:
        """Whether a place, no normalisation itself, takes the output of one, and of nothing else."""
        places = self._walk.places
        behind = i > 0 and isinstance(places[i - 1].local, Normalised) and self._walk.on_every_way(i - 1, i)
        return behind and not isinstance(places[i].local, Normalised)

    def _derive(self, i: int) -> None:
        """The functions of a place, from those of the normalisation before it."""
        self._in_time()
        local, norm, defect = self._walk.local(i), self._walk.local(i - 1), self._walk.places[i - 1].defect
        assert isinstance(norm, Normalised)
        self.derived[i] = derived = Derived(local, norm, self.tokens[i], defect)
        X = derived.X
        self.suprema[i], self._sights[i] = self._region.supremum(X), {}
        local.place(X, self.suprema[i])

    def _place(self, i: int, pulled: list[Covectors], error: Tensor) -> None:
        functions = Covectors.joined(pulled)
        self.functions[i], self.suprema[i] = (functions, error), self._region.supremum(functions.X)
        self._walk.local(i).place(functions.X, self.suprema[i])

    def _prepare_with(self, jets: Jets) -> None:
        """First the orders of all functions; then, when their tensors are gone, what earlier places make of these."""
        for i in self._walk.curved:
            C, error = self._walk.local(i).covectors(self.tokens[i])
            parts, lengths = [], []
            for some in C.parts(self._together(i)):
                lengths.append(frobenius_upper(some))
                parts.append(self._walk.pulled(some, i, self._region).without_places())
            self._place(i, parts, error)
            jets.reach(i, torch.cat(lengths), error)
            self._sights[i] = {}
            give_back_memory()
        jets.finish()
        give_back_memory()
        room = float(_ROOM)
        for i in self._walk.curved:
            numbers = sum(self._walk.local(k).numbers for k in self._walk.curved if k < i)
            C, _ = self._walk.local(i).covectors(self.tokens[i])
            self._parts[i] = []
            for some in C.parts(self._together(i)):
                room -= len(some) * numbers
                self._parts[i].append(self._made(i, some, C.count) if room > 0 else None)

    def _made(self, i: int, some: Tensor, count: int) -> BatchPart:
        """What earlier places make of some of the functions of a place."""
        self._in_time()
        at = self._walk.pulled(some, i, self._region).at
        return self._part(at, len(some), len(some) / count)

    def of(self, i: int) -> Iterator[BatchPart]:
        """The functions of a place in parts."""
        parts = self._parts[i]
        if None not in parts:
            yield from (part for part in parts if part is not None)
            return
        C, _ = self._walk.local(i).covectors(self.tokens[i])
        for part, index in zip(parts, torch.split(torch.arange(C.count), self._together(i)), strict=True):
            yield self._made(i, C.made(index), C.count) if part is None else part

    def _prepare_outputs(self) -> None:
        """Where covectors at an attention's output vary, every coordinate of it counts by its own rest."""
        kept = [part for parts in self._parts.values() for part in parts if part is not None]
        parts = [*kept, *(part for batch in self.bends.values() for part in batch), self.ends]
        varying = {k for part in parts for k in part.turning}
        for i in reversed(self._walk.curved):
            attention = self._walk.local(i).attention
            if attention is not None and i in varying:
                identity = attention.identity()
                self.outputs[i] = [
                    self._turned({i: attention.prepare(some)}, len(some), len(some) / len(identity))
                    for some in torch.split(identity, self._together(i))
                ]
                varying |= {k for part in self.outputs[i] for k in part.turning}

    def _together(self, i: int) -> int:
        """How many covectors at a place are treated at once: those of some tokens."""
        width = max([self._walk.start.numel(), *(place.u.numel() for place in self._walk.places)])
        stride = self._walk.local(i).stride
        return max(1, _CHUNK // (width * stride)) * stride

    def _part(self, at: dict[int, Tensor], count: int, share: float) -> BatchPart:
        """A share of a batch of covectors at the outputs of some places."""
        self._check_tokens(at)
        return self._turned({k: self._walk.local(k).prepare(mu) for k, mu in at.items()}, count, share)

    def _check_tokens(self, at: dict[int, Tensor]) -> None:
        for k, mu in at.items():
            others = torch.ones(mu.shape[1], dtype=torch.bool)
            others[self.tokens[k]] = False
            if bool((mu[:, others] != 0).any()):
                raise SoundnessError(f"forms missed a token that matters at place {k}; please report")

    def _turned(self, prepared: dict[int, Any], count: int, share: float) -> BatchPart:
        """With how the covectors turn, if that is affordable."""
        turning: dict[int, Tensor] = {}
        for i, rows in prepared.items():
            attention = self._walk.local(i).attention
            if attention is not None and self._sights[i]:
                turned = attention.turned(rows, self._sights[i], share * _BUDGET)
                if turned is not None:
                    rows.turn()
                    for k, norms in turned.items():
                        turning[k] = turning[k] + norms if k in turning else norms
        return BatchPart(count, prepared, turning)

    @property
    def expanded(self) -> bool:
        """Whether margins have a second and a third order, in which all places meet."""
        return self.jets is not None and bool(self.jets.third)

    def beyond(self, i: int, radius: float, enough: Tensor, tiny: Tensor) -> Rests:
        """What a place's functions have beyond first order, with `tiny` for the rounding of that."""
        functions = self.functions[i][0]
        if self.jets is None:
            low, high = self.ranges(self.of(i), radius, enough)
            return Rests(up(tiny + low, 1e-10), up(tiny + high, 1e-10), tiny)
        second, third = self._orders(i, radius)
        lost = tiny + sum(self.jets.tiny(functions, radius))
        low, high = self.ranges(self.of(i), radius, enough, bent=False, before=i, tiny=lost)
        low, high = up(lost + low, 1e-10), up(lost + high, 1e-10)
        fourth = torch.maximum(low, high)
        known = (third + fourth, fourth, lost) if self.jets.third else ()
        return Rests(low + second + third, high + second + third, tiny, *known)

    def _orders(self, i: int, radius: float) -> tuple[Tensor, Tensor]:
        """Bounds of functions' second and third orders."""
        assert self.jets is not None
        second = self.jets.second[i] * up(radius * radius, 1e-10)
        if not self.jets.third:
            return second, torch.zeros_like(second)
        return second, self.jets.third[i] * up(radius * radius * radius, 1e-10)

    def unsure(self, radius: float) -> Tensor:
        """What rounding may have done to the margins' second and third orders."""
        assert self.jets is not None
        return sum(self.jets.tiny(self._margins, radius), torch.zeros(self.ends.count, dtype=torch.float64))

    def at_end(self, radius: float, tiny: Tensor, enough: Tensor | None = None) -> dict[str, Tensor]:
        """What may be taken off the margins beyond first order, by name: with jets the orders, then every kind of rest.

        Bounds below `enough` need not be sharper.
        """
        end = len(self._walk.places)
        if not self.expanded:
            return self._named(self._added(self.ends, radius, enough))
        second, third = self._orders(end, radius)
        unsure = self.unsure(radius)
        beyond = self._added(self.ends, radius, bent=False, before=end, tiny=tiny + unsure)
        return {"second order": second, "third order": third, "rounding": unsure} | self._named(beyond)

    def _named(self, added: Iterable[tuple[int, Tensor, Tensor]]) -> dict[str, Tensor]:
        """How far what places add goes down, by what each calls its rest."""
        lows: dict[str, Tensor] = {}
        for i, low, _ in added:
            name = self._walk.local(i).rest
            lows[name] = lows[name] + low if name in lows else low
        return lows

    def ranges(
        self,
        batch: Iterable[BatchPart],
        radius: float,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        before: int | None = None,
        tiny: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the rests of all earlier places add to the functions of a batch, from -low to high; see `Local.range`.

        Functions of the place `before` have ways that all lead through some places; `tiny` is added to what those are
        told of earlier ones.
        """
        lows, highs, start = [], [], 0
        for part in batch:
            low = high = torch.zeros(part.count, dtype=torch.float64)
            here = slice(start, start + part.count)
            some, unsure = (None if of_all is None else of_all[here] for of_all in (enough, tiny))
            for _, below, above in self._added(part, radius, some, bent=bent, before=before, tiny=unsure):
                low, high = low + below, high + above
            lows.append(low)
            highs.append(high)
            start += part.count
        return torch.cat(lows), torch.cat(highs)

    def _added(
        self,
        part: BatchPart,
        radius: float,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        before: int | None = None,
        tiny: Tensor | None = None,
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The same of one part, place by place."""
        low = high = torch.zeros(part.count, dtype=torch.float64)
        for i in sorted(part.prepared.keys() | part.turning.keys()):
            varying = part.turning[i] * radius if i in part.turning else None
            earlier = None
            if before is not None and tiny is not None and self._walk.on_every_way(i, before):
                earlier = up(torch.maximum(low, high) + tiny, 1e-10)
            local = self._walk.local(i)
            below, above = local.range(part.prepared.get(i), varying, enough, bent=bent, earlier=earlier)
            low, high = low + below, high + above
            yield i, below, above


def _joined(sights: list[dict[int, tuple[Tensor, float]]]) -> dict[int, tuple[Tensor, float]]:
    """What counts of parts of the functions of a place, for all of them."""
    return {
        k: (torch.cat([part[k][0] for part in sights]), up(math.hypot(*(part[k][1] for part in sights)), 1e-9))
        for k in (sights[0] if sights else ())
    }
