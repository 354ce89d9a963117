"""What every composition must satisfy."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import normalize

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import Composition, Radii, certify_inputs, compositions
from holdfast.compositions.base import NetworkMethod
from holdfast.errors import NotApplicableError
from holdfast.linalg.curves import RATIO
from holdfast.network.centre import Centre
from holdfast.results import Guarantee
from holdfast.testing.draw import Dice
from holdfast.testing.every import over
from holdfast.testing.networks import NetworkCase, draw_network, network_cases

SHARES = (1e-3, 0.1, 0.5, 1.0, 3.0)  # of the first-order radius: where margins are examined
_SMALL = 1e-9  # rounding, beside numbers of about 1
_DESCENT = 12
_UNIT = RATIO**3  # exact in binary, and constants are taken at the next radius of a grid that it leaves as it is


def _applicable(kit: CompositionConformance) -> list[NetworkCase]:
    return [case for case in network_cases() if compositions[kit.name()].refusal(case.network) is None]


def _one_that_attends(chosen: list[NetworkCase]) -> list[NetworkCase]:
    """All that do not, and the first that does."""
    attending = [case for case in chosen if case.attends]
    return [case for case in chosen if case not in attending[1:]]


_every = over(_applicable)
_exact = over(lambda kit: [case for case in _applicable(kit) if case.exact is not None])
_elsewhere_too = over(lambda kit: _one_that_attends(_applicable(kit)))
_attending = over(lambda kit: [case for case in _applicable(kit) if case.attends][:1])
_small = over(lambda kit: [case for case in _applicable(kit) if not case.attends])


class CompositionConformance(ABC):
    """No radius is above the nearest change of the answer, and radii follow the symmetries of networks.

    The tests run over the networks that the composition does not refuse. Radii are proved for one input of each, and
    numerical for a batch; what compositions share at one network and input is computed once for all of them.
    """

    @abstractmethod
    def name(self) -> str:
        """The name under which the composition is registered."""

    # -- what it says about itself

    def test_metadata_is_complete(self) -> None:
        method = self._method()
        assert method in compositions.values()
        assert method.name == self.name()
        for text in (method.cost, method.reference, method.assumptions, type(method).__doc__):
            assert text is not None
            assert text.strip()

    def test_applies_somewhere_and_refuses_the_rest_by_name(self) -> None:
        assert _applicable(self)
        for case in network_cases():
            if case not in _applicable(self):
                try:
                    certify_inputs(case.network, case.x, method=self.name())
                except NotApplicableError as error:
                    assert self.name() in str(error)  # noqa: PT017 - the kit does without pytest
                    assert case.name in str(error)  # noqa: PT017
                else:
                    raise AssertionError(f"{case.name} was refused and yet certified")

    @_every
    def test_result_says_what_it_is(self, case: NetworkCase) -> None:
        for radii, inputs in ((self._proved(case), 1), (self._numerical(case), len(case.x))):
            for values in (radii.radius, radii.margin):
                assert (values.shape, values.dtype) == ((inputs,), torch.float64)
                assert bool((torch.isfinite(values) & (values > 0)).all())
            assert len(radii.methods) == inputs
            assert set(radii.methods) <= set(compositions)
            assert len(radii.losses) == inputs
            assert all(sum(lost.values()) > 0 for lost in radii.losses)
            json.dumps(radii.losses, allow_nan=False)

    @_small
    def test_records_are_those_radii(self, case: NetworkCase) -> None:
        radii, y = self._numerical(case), case.network(case.x).argmax(-1)
        records = certify_inputs(case.network, case.x, method=self.name(), guarantee="numerical")
        for i, record in enumerate(records):
            assert (record.prediction, record.decided, record.guarantee) == (int(y[i]), True, "numerical")
            assert (record.radius, record.method) == (float(radii.radius[i]), radii.methods[i])
            assert record.margin == float(_centre(case, "numerical").margin[i])

    # -- size

    @_every
    def test_no_change_of_the_answer_is_nearer(self, case: NetworkCase) -> None:
        _below(self._proved(case).radius, _nearest(case)[:1])
        _below(self._numerical(case).radius, _nearest(case))

    @_exact
    def test_not_above_the_exact_radius(self, case: NetworkCase) -> None:
        assert case.exact is not None
        _below(self._proved(case).radius, case.exact[:1])
        _below(self._numerical(case).radius, case.exact * (1 + _SMALL))

    @_every
    def test_margins_are_lower_bounds_and_do_not_increase(self, case: NetworkCase) -> None:
        if _has_curve(method := self._method()):
            curve = method.curve(_centre(case, "numerical"))
            values = [curve(eps) for eps in _looked_at(case)]
            for value, attained in zip(values, _attained(case), strict=True):
                _below(value, attained)
            for nearer, farther in itertools.pairwise(values):
                _below(farther, nearer)

    @_attending
    def test_a_margin_does_not_depend_on_what_was_asked_before(self, case: NetworkCase) -> None:
        if _has_curve(method := self._method()):
            eps = _looked_at(case)[2]
            alone = method.curve(Centre(case.network, case.x, guarantee="numerical"))(eps)
            curve = method.curve(_centre(case, "numerical"))
            *_, again = [curve(asked) for asked in (*_looked_at(case)[::-1], eps)]
            torch.testing.assert_close(again, alone, rtol=1e-8, atol=_SMALL)

    @_every
    def test_a_radius_is_where_the_margin_ends(self, case: NetworkCase) -> None:
        if _has_curve(method := self._method()):
            radius, curve = self._numerical(case).radius, method.curve(_centre(case, "numerical"))
            assert bool((curve(radius) > 0).all())
            assert not bool((curve(radius * (1 + 3 * method.precision)) > 0).any())

    @_every
    def test_proved_is_not_above_numerical_and_close(self, case: NetworkCase) -> None:
        proved, numerical = self._proved(case).radius, self._numerical(case).radius[:1]
        _below(proved, numerical * (1 + self._precision()))
        _below(numerical, proved * (1 + 4 * self._precision()))
        if _has_curve(method := self._method()):
            below, above = (method.curve(centre)(proved) for centre in _both(case))
            _below(below, above + _SMALL * (1 + above.abs()))

    @_small
    def test_what_is_already_known_is_not_lost(self, case: NetworkCase) -> None:
        """Given a smaller radius it finds its own; asked for what is beyond it, it claims no more."""
        radius, centre = self._numerical(case).radius, _centre(case, "numerical")
        self._same(self._method()(centre, radius * 0.9).radius, radius)
        _below(self._method()(centre, radius * 2.0).radius, radius * (1 + 3 * self._precision()))

    @_small
    def test_a_tie_proves_nothing(self, case: NetworkCase) -> None:
        head, y = case.network.head, case.network(case.x[:1]).argmax(-1)
        twice = case.with_head(*(torch.cat([part, part[y]]) for part in (head.weight, head.bias)))
        (record,) = certify_inputs(twice.network, twice.x[:1], method=self.name())
        assert not record.decided
        assert record.radius == 0

    # -- symmetries

    @_elsewhere_too
    def test_batch_and_coordinates_do_not_matter(self, case: NetworkCase) -> None:
        """An input alone, in another basis and a unit s of length, with logits in another unit and order: s times."""
        alone = self._method()(_centre(_elsewhere(case), "numerical"))
        self._same(alone.radius, _UNIT * self._numerical(case).radius[1:])

    @_small
    def test_float32_is_computed_in_float64(self, case: NetworkCase) -> None:
        """Weights and inputs of float32 mean the same numbers in float64, and these are near the case's own."""
        single = draw_network(case.name, torch.float32)
        (of_floats,) = certify_inputs(single.network, single.x[:1].float(), method=self.name())
        (of_doubles,) = certify_inputs(single.network, single.x[:1], method=self.name())
        assert of_floats.radius == of_doubles.radius
        self._same(torch.tensor([of_floats.radius], dtype=torch.float64), self._proved(case).radius)

    # -- helpers

    def _method(self) -> NetworkMethod:
        return compositions[self.name()]

    def _precision(self) -> float:
        """To which two searches for one radius agree; `best` may take the radius of any composition."""
        method = self._method()
        own = [method] if _has_curve(method) else compositions.values()
        return max(one.precision for one in own if isinstance(one, Composition))

    def _proved(self, case: NetworkCase) -> Radii:
        """Of the first input."""
        return _solved(self._method(), case, "proved")

    def _numerical(self, case: NetworkCase) -> Radii:
        """Of every input."""
        return _solved(self._method(), case, "numerical")

    def _same(self, radius: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(radius, expected, rtol=3 * self._precision(), atol=0)


def _has_curve(method: NetworkMethod) -> TypeGuard[Composition]:
    return isinstance(method, Composition)


def _below(lower: Tensor, upper: Tensor) -> None:
    assert bool((lower <= upper).all()), f"{lower.tolist()} is above {upper.tolist()}"


@cache
def _centre(case: NetworkCase, guarantee: Guarantee) -> Centre:
    """Proofs are for the first input alone."""
    return Centre(case.network, case.x[:1] if guarantee == "proved" else case.x, guarantee=guarantee)


def _both(case: NetworkCase) -> tuple[Centre, Centre]:
    """The first input in both arithmetics."""
    centre = _centre(case, "proved")
    return centre, centre.numerical


@cache
def _solved(method: NetworkMethod, case: NetworkCase, guarantee: Guarantee) -> Radii:
    return method(_centre(case, guarantee))


@cache
def _elsewhere(case: NetworkCase) -> NetworkCase:
    """The second input, in other coordinates."""
    d, head = case.x.shape[-1], case.network.head
    moved = case.through(_UNIT * torch.linalg.qr(Dice(0).normal(d, d)).Q)
    moved = moved.with_head(8 * head.weight.flip(0), 8 * head.bias.flip(0))
    return NetworkCase(moved.name, moved.network, moved.x[1:])


@cache
def _nearest(case: NetworkCase) -> Tensor:
    """(b) how near an attack comes, as far as that is proved."""
    nearest = MinimalAttack(steps=20)(case.network, case.x, case.network(case.x).argmax(-1))
    assert nearest.guarantee == "proved"
    return nearest.radius


@cache
def _looked_at(case: NetworkCase) -> list[Tensor]:
    return [share * _centre(case, "numerical").first_order_radius for share in SHARES]


@cache
def _attained(case: NetworkCase) -> list[Tensor]:
    """For every radius (b) the smallest margin that a descent finds within it."""
    return [_descended(case, case.network(case.x).argmax(-1), eps) for eps in _looked_at(case)]


def _descended(case: NetworkCase, y: Tensor, eps: Tensor) -> Tensor:
    limit, least = (eps * (1 - 1e-9)).unsqueeze(1), torch.full_like(eps, torch.inf)
    move = limit * normalize(Dice(1).normal(*case.x.shape).flatten(1))
    for _ in range(_DESCENT):
        move = move.detach().requires_grad_()
        logits: Tensor = case.network(case.x + move.reshape(case.x.shape))
        margin = logits.gather(1, y[:, None]).squeeze(1) - logits.scatter(1, y[:, None], -torch.inf).amax(1)
        least = torch.minimum(least, margin.detach())
        (slope,) = torch.autograd.grad(margin.sum(), move)
        move = limit * normalize(move.detach() - limit * normalize(slope))
    return least
