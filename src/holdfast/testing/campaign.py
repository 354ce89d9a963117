"""The soundness campaign: random layers, and for each a search for a point where a bound is below the truth.

Every bound of the movement over a ball is attacked over its whole ball, and so is every ingredient of `ingredients.py`.
The pieces of networks are drawn likewise, and each of their constants is attacked; and small networks, whose margins
every composition bounds over balls, boxes and clipped boxes.
What an attack attains is rounded down, so a proved bound gets no tolerance at all; a numerical one gets its documented
slack. A layer is drawn from its own seed: `run_campaign(1, seed, demo=False)` repeats what was found at that seed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from holdfast.api import attack
from holdfast.attention import AttentionLayer
from holdfast.attention.movement import movement
from holdfast.bounds import Bound
from holdfast.bounds import bounds as registry
from holdfast.bounds.base import NUMERICAL_SLACK
from holdfast.bounds.over_ball import OverBall
from holdfast.compositions import Composition, compositions
from holdfast.data.digits import demo_digits
from holdfast.errors import HoldfastError, SoundnessError
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Proved
from holdfast.linalg.rounding import down, up
from holdfast.linalg.threat import L2, LINF, Threat
from holdfast.models import load_digits_vit
from holdfast.network.centre import Centre
from holdfast.results import Guarantee
from holdfast.testing.draw import draw
from holdfast.testing.draw_pieces import KINDS, draw_piece
from holdfast.testing.ingredients import Constants, Ingredient, Situation, ingredients_of
from holdfast.testing.layers import Case
from holdfast.testing.network_attack import least_margins
from holdfast.testing.networks import NETWORK_KINDS, NetworkCase, draw_network
from holdfast.testing.pieces import PieceCase, attained
from holdfast.testing.pieces import bound as constant_bound
from holdfast.testing.probes import climb, directions, inside

RADII = (1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0)
_SHARES = (1.0, 0.7, 0.1, -1.0)  # of the radius, along each direction
_FIRST_ORDER = (1e-3, 0.1, 0.5, 1.0, 2.0)  # shares of the first-order radius of a network
_CLIMBED = 3  # ingredients that are climbed for at each layer; all are checked wherever one led


@dataclass(frozen=True)
class Subject:
    """A layer, a piece or a network with inputs, and the seed that leads to it; None for a layer of the demo model."""

    case: Case | PieceCase | NetworkCase
    seed: int | None


@dataclass(frozen=True)
class Finding:
    """Something that must not happen.

    Attributes:
        what: the bound, ingredient or constant, with its guarantee.
        layer: what is particular about the layer, piece or network.
        seed: repeats it.
        detail: the numbers, or the error.
        is_piece: whether it is a piece of a network.
        is_network: whether it is a network.
    """

    what: str
    layer: str
    seed: int | None
    detail: str
    is_piece: bool = False
    is_network: bool = False


@dataclass
class CampaignReport:
    """What a campaign did and found.

    Attributes:
        layers: how many were examined.
        pieces: likewise.
        networks: likewise.
        checks: comparisons of a bound with something attained.
        violations: a bound or ingredient below something attained.
        failures: errors other than a clear refusal.
        refusals: how often each bound refused, for want of a finite float64 value or of a proof.
        slack: the smallest bound / attained - 1 of each bound and ingredient.
        seconds: wall time.
    """

    layers: int = 0
    pieces: int = 0
    networks: int = 0
    checks: int = 0
    violations: list[Finding] = field(default_factory=list)
    failures: list[Finding] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    slack: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.violations and not self.failures

    def add(self, other: CampaignReport) -> None:
        """Takes the findings of another report in."""
        self.layers += other.layers
        self.pieces += other.pieces
        self.networks += other.networks
        self.checks += other.checks
        self.violations += other.violations
        self.failures += other.failures
        self.refusals += other.refusals
        for name, slack in other.slack.items():
            self.slack[name] = min(slack, self.slack.get(name, slack))
        self.seconds += other.seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {"sound": self.sound, "refusals": dict(self.refusals)}


def subjects(layers: int, seed: int, *, demo: bool = True, pieces: int = 0, networks: int = 0) -> Iterator[Subject]:
    """What a campaign examines: the demo model's layers at one of its digits, random layers, pieces and networks."""
    if demo:
        images = demo_digits().images
        entering = load_digits_vit().attention_inputs(images[seed % len(images)].unsqueeze(0))
        for name, (module, x) in entering.items():
            yield Subject(Case(name, AttentionLayer.from_module(module), x), None)
    for own in range(seed, seed + layers):
        yield Subject(draw(own), own)
    kinds = list(KINDS)
    for own in range(seed, seed + pieces):
        yield Subject(draw_piece(kinds[own % len(kinds)], own), own)
    for own in range(seed, seed + networks):
        yield Subject(draw_network(NETWORK_KINDS[own % len(NETWORK_KINDS)], seed=own), own)


def run_campaign(
    layers: int,
    seed: int = 0,
    seconds: float | None = None,
    *,
    demo: bool = True,
    pieces: int = 0,
    networks: int = 0,
    progress: Callable[[int], None] | None = None,
) -> CampaignReport:
    """Examines layers until all are done or the time is over.

    Args:
        layers: how many random layers; the seed of layer i is `seed + i`.
        seed: of the first layer.
        seconds: time after which no further layer is begun.
        demo: whether the layers of the demo model come first.
        pieces: how many random pieces of networks come next, with seeds as the layers.
        networks: how many random networks come last, likewise.
        progress: called with the number of layers, pieces and networks done.
    """
    began, report = time.perf_counter(), CampaignReport()
    for subject in subjects(layers, seed, demo=demo, pieces=pieces, networks=networks):
        if seconds is not None and time.perf_counter() - began > seconds:
            break
        report.add(examine(subject))
        if progress is not None:
            progress(report.layers + report.pieces + report.networks)
    return report


def examine(subject: Subject, radii: Sequence[float] = RADII) -> CampaignReport:
    """Attacks every bound and ingredient of a layer, every constant of a piece, or every composition on a network.

    `radii` must grow; those of a network are shares of its own first-order radius.
    """
    if isinstance(subject.case, NetworkCase):
        return _NetworkExamination(subject, subject.case, list(radii)).run()
    if isinstance(subject.case, PieceCase):
        return _PieceExamination(subject, subject.case, list(radii)).run()
    return _LayerExamination(subject, subject.case, list(radii)).run()


class _UnderAttack(ABC):
    """Something under attack, and the record of it."""

    def __init__(self, subject: Subject, radii: list[float], report: CampaignReport) -> None:
        self._subject, self._radii, self._report = subject, radii, report
        self._seed = subject.seed or 0

    @abstractmethod
    def _attack(self) -> None:
        """Compares every bound with what is attained."""

    @final
    def run(self) -> CampaignReport:
        began = time.perf_counter()
        self._attack()
        self._report.seconds = time.perf_counter() - began
        return self._report

    # -- the record

    def _compare(self, what: str, bound: Tensor, attained: Tensor, slack: float = 0.0) -> None:
        report = self._report
        attained = attained.nan_to_num(nan=0.0, neginf=0.0)
        bound = bound.expand_as(attained)
        known = torch.isfinite(bound)
        if not bool(known.all()):
            report.refusals[what] += 1
        bound, attained = bound[known], attained[known]
        report.checks += bound.numel()
        moved = attained > 0
        if not bool(moved.any()):
            return
        margin = bound[moved] / attained[moved] - 1
        least = float(margin.min())
        report.slack[what] = min(least, report.slack.get(what, least))
        below = bound * (1 + slack) < attained
        if bool(below.any()):
            worst = int((attained - bound).masked_fill(~below, -torch.inf).argmax())
            numbers = f"{int(below.sum())} of {below.numel()}: {float(bound[worst])!r} < {float(attained[worst])!r}"
            report.violations.append(self._finding(what, numbers))

    def _guarded(self, what: str, work: Callable[[], Any], *, count: bool = True) -> Any:
        """The result of the work; None where it refused or failed, which is recorded."""
        try:
            return work()
        except SoundnessError as error:
            self._report.violations.append(self._finding(what, str(error)))
        except HoldfastError:
            self._report.refusals[what] += int(count)
        except Exception as error:
            self._report.failures.append(self._finding(what, f"{type(error).__name__}: {error}"))
        return None

    def _finding(self, what: str, detail: str) -> Finding:
        case = self._subject.case
        kinds = isinstance(case, PieceCase), isinstance(case, NetworkCase)
        return Finding(what, case.name, self._subject.seed, detail, *kinds)


@final
class _PieceExamination(_UnderAttack):
    """One piece of a network under attack."""

    def __init__(self, subject: Subject, case: PieceCase, radii: list[float]) -> None:
        super().__init__(subject, radii, CampaignReport(pieces=1))
        self._case = case

    def _attack(self) -> None:
        constants = self._guarded("attack of a piece", lambda: attained(self._case, self._radii, self._seed)) or {}
        for constant, reached in constants.items():
            name = f"{type(self._case.piece).__name__}, {constant}"
            value = self._guarded(name, lambda c=constant: self._constant(c))  # type: ignore[misc]
            if value is not None:
                self._compare(name, value, reached)

    def _constant(self, constant: str) -> Tensor:
        return constant_bound(Proved(), self._case.piece, constant, self._case.u, self._radii)


@final
class _NetworkExamination(_UnderAttack):
    """The margins of one network under attack: how far they fall within reach is at most what compositions say."""

    def __init__(self, subject: Subject, case: NetworkCase, radii: list[float]) -> None:
        super().__init__(subject, radii, CampaignReport(networks=1))
        self._network, self._x = case.network, case.x

    def _attack(self) -> None:
        clipped = Threat("linf", (float(self._x.min()), float(self._x.max())))
        for threat in (L2, LINF, clipped):
            self._guarded(f"attack of a network, {threat.norm}", lambda t=threat: self._within(t))  # type: ignore[misc]

    def _within(self, threat: Threat) -> None:
        centre = Centre(self._network, self._x)
        first = centre.first_order(threat)
        radii = [(share * first).clamp(max=threat.most) for share in _FIRST_ORDER]
        answers = centre.prediction
        least = [least_margins(self._network, self._x, answers, eps, threat, self._seed) for eps in radii]
        for method in compositions.values():
            if isinstance(method, Composition) and method.refusal(self._network) is None:
                where = f"{threat.norm}, clipped" if threat.clip is not None else threat.norm
                name, curve = f"{method.name}, {where}", method.curve(centre, threat)
                for eps, attained in zip(radii, least, strict=True):
                    margins = self._guarded(name, lambda c=curve, e=eps: c(e))  # type: ignore[misc]
                    if margins is not None:
                        self._compare(name, up(centre.margin - margins), down(centre.margin - attained))


@final
class _LayerExamination(_UnderAttack):
    """One layer under attack."""

    def __init__(self, subject: Subject, case: Case, radii: list[float]) -> None:
        super().__init__(subject, radii, CampaignReport(layers=1))
        self._case = case
        self._layer, self._x = case.layer.double(), case.x.double()

    def _attack(self) -> None:
        reached = self._guarded("attack", self._attained)
        if reached is not None:
            for bound in registry.values():
                for guarantee in bound.guarantees:
                    self._bound(bound, guarantee, reached)
        if self._layer.soft_cap is None and self._layer.sinks is None:
            self._guarded("ingredients", self._ingredients)

    # -- bounds

    def _attained(self) -> Tensor:
        """(b, e) how far the output was moved, rounded down."""
        case, x, layer = self._case, self._x, self._layer
        result = attack(case.layer, case.x, self._radii, restarts=1, steps=20, seed=self._seed)
        radii = x.new_tensor(self._radii).reshape(-1, *(1 for _ in x.shape))
        witness = (result.witness.movedim(-3, 0) - x) / radii
        ways = torch.cat([directions(layer, x, self._seed).unsqueeze(1).expand(-1, *witness.shape), witness[None]])
        best = result.lower.movedim(-1, 0)
        for share in _SHARES:
            z = inside(x, x + share * radii * ways, radii)
            best = torch.maximum(best, movement(layer, x, z).lower.nan_to_num(nan=0.0).amax(0))
        return best.cummax(0).values.movedim(0, -1)  # a smaller ball lies inside a larger one

    def _bound(self, bound: Bound, guarantee: Guarantee, attained: Tensor) -> None:
        """Compares a bound; where it refuses all radii at once, each by itself."""
        name, slack = f"{bound.name}, {guarantee}", NUMERICAL_SLACK if guarantee == "numerical" else 0.0
        value = self._guarded(name, lambda: self._value(bound, self._radii, guarantee), count=False)
        if value is not None:
            self._compare(name, value, attained, slack)
            return
        for i, radius in enumerate(self._radii):
            value = self._guarded(name, lambda r=radius: self._value(bound, [r], guarantee))  # type: ignore[misc]
            if value is not None:
                self._compare(name, value, attained[..., i : i + 1], slack)

    def _value(self, bound: Bound, radii: list[float], guarantee: Guarantee) -> Tensor:
        return bound(self._case.layer, self._case.x, radii, guarantee=guarantee).value

    # -- ingredients

    def _ingredients(self) -> None:
        layer, x = self._layer, self._x
        radii = x.new_tensor(self._radii)
        a, ingredients = Proved(), ingredients_of(layer)
        with torch.no_grad():
            constants = Constants(OverBall(a, layer, x, a.lift(radii)), layer, x, radii)
            bounds = {ingredient.name: _upper(ingredient.bound(constants)) for ingredient in ingredients}
        r = radii.reshape(-1, *(1 for _ in x.shape))
        generator = torch.Generator().manual_seed(self._seed)
        t = float(torch.rand((), generator=generator))
        ways = directions(layer, x, self._seed).unsqueeze(1)
        ways = ways.expand(ways.shape[0], len(radii), *x.shape)
        order = torch.randperm(len(ways), generator=generator)
        pool = [(r * ways, ways[order])]
        for index in torch.randperm(len(ingredients), generator=generator)[:_CLIMBED].tolist():
            pool.append(climb(self._ratio(ingredients[index], bounds, t), r, *(part[::2] for part in pool[0])))
        for moves, g in pool:
            z = inside(x, x + moves, r)
            unit = Ball.exact(g * (1 - 1e-12))
            with torch.no_grad():
                situation = Situation(layer, Ball.exact(x), Ball.exact(z), unit, t)
                for ingredient in ingredients:
                    self._compare(ingredient.name, bounds[ingredient.name], ingredient.truth(situation).lower)

    def _ratio(self, ingredient: Ingredient, bounds: dict[str, Tensor], t: float) -> Callable[[Tensor, Tensor], Tensor]:
        """What is climbed for: the largest ratio of the truth to the bound, (m, r, b…)."""
        bound = bounds[ingredient.name]

        def ratio(moves: Tensor, g: Tensor) -> Tensor:
            truth: Tensor = ingredient.truth(Situation(self._layer, self._x, self._x + moves, g, t))
            share = truth / torch.where(bound > 0, bound, torch.inf)
            return share.flatten(g.ndim - 2).amax(-1) if share.ndim > g.ndim - 2 else share

        return ratio


def _upper(value: Ball | Tensor) -> Tensor:
    return value.upper if isinstance(value, Ball) else value
