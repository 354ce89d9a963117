"""The largest radius of all compositions."""

from __future__ import annotations

import math
from collections import deque
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.base import LARGEST_BALL, Aim, NetworkMethod, Radii, compositions, register_composition
from holdfast.errors import MemoryLimitError, NotApplicableError
from holdfast.layers.attention.piece import Attention
from holdfast.linalg.threat import Threat
from holdfast.network.centre import Centre
from holdfast.network.network import Network

_QUICK_SHARE = 1 / 20  # of the time there is: for the quick composition where others are to follow
_MANY = 1024  # numbers beyond which Jacobians on all tokens take minutes


@final
@register_composition
class BestComposition(NetworkMethod):
    """The largest radius of every composition that applies, and which one it was.

    The quick composition goes first, then the others, those that usually reach farther first; for boxes, those that
    bound margins over boxes, and before them the quick one if there is a deadline. Each one guesses whether it
    certifies more than is already known (see `Composition`), and proves only if so. Every radius that is returned is
    proved. A radius that a guess misses is lost. Balls around boxes are tried unless first order alone shows that they
    are too large.

    Two things are left out unless there is a deadline, and `unfinished` names them: if attention acts on so many
    numbers that the others take minutes, all but the quick one; and a composition that takes long, if the one that it
    names (`instead`) has proved a radius. With a deadline they are tried until then, and the best so far counts.
    The quick one has a twentieth of the time, and where that was not enough and the others prove nothing, what is left.
    """

    name = "best"
    cost = "that of the quick one and of the winner as a rule; the others are tried in plain float64"
    reference = "holdfast"
    shapes = frozenset({"ball", "box"})

    def refusal(self, network: Network) -> str | None:
        return None

    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None, aim: Aim = LARGEST_BALL) -> Radii:
        answers: list[Radii] = []
        methods, notes, unfinished = _chosen(centre, aim.threat)
        left, cut = deque(methods), list[NetworkMethod]()
        while left:
            method = left.popleft()
            if method.through(aim.threat) is not None and beyond is not None and _hopeless(centre, beyond, aim.threat):
                continue
            if answers and beyond is not None and aim.at and bool((beyond >= max(aim.at)).all()):
                break  # no more is needed
            if method in cut and (centre.overdue or _all_proved(centre, beyond)):
                break
            if centre.overdue and answers:
                names = ", ".join(one.name for one in (method, *left) if one not in cut)
                unfinished.append(f"the time was over before {names} could be tried")
                break
            done = {one.methods[0] for one in answers if bool((one.radius > 0).all())}
            try:
                if method.instead in done and centre.deadline == math.inf and method.takes_long(centre):
                    unfinished.append(
                        f"{method.name} may reach farther than {method.instead}, but takes much longer and was not "
                        "tried; call it by its name, or let seconds_per_input (--seconds-per-input) say for how long"
                    )
                    continue
                with centre.within(_QUICK_SHARE if method.quick and left else 1.0):
                    answers.append(method(centre, beyond, aim))
            except (MemoryLimitError, NotApplicableError) as reason:
                notes.append(str(reason))
            else:
                unfinished += answers[-1].unfinished
                if method.quick and left and answers[-1].unfinished:
                    cut.append(method)
                    left.append(method)  # for the time that the others leave
                beyond = answers[-1].radius if beyond is None else torch.maximum(beyond, answers[-1].radius)
        if not answers:
            raise NotApplicableError("no composition applies: " + "; ".join(notes))
        radius, winner = torch.stack([one.radius for one in answers]).max(0)
        margin = torch.stack([one.margin for one in answers]).gather(0, winner.unsqueeze(0)).squeeze(0)
        winners = tuple(answers[which].methods[i] for i, which in enumerate(winner.tolist()))
        losses = tuple(
            answers[which].losses[i] if answers[which].losses else {} for i, which in enumerate(winner.tolist())
        )
        lead = torch.stack([one.lead for one in answers]).amax(0)
        return Radii(radius, margin, winners, lead, tuple(notes), losses, tuple(dict.fromkeys(unfinished)))


def _chosen(centre: Centre, threat: Threat) -> tuple[list[NetworkMethod], list[str], list[str]]:
    """The methods in the order in which they are tried, notes of what cannot be, and of what would take too long."""
    notes: list[str] = []
    unfinished: list[str] = []
    methods = [method for method in compositions.values() if method.name != BestComposition.name]
    if (sizes := _large(centre)) is not None:
        moving = centre.x[0].numel()
        fit = [method for method in methods if method.for_large and moving <= method.most_inputs]
        left_out = ", ".join(method.name for method in methods if method not in fit)
        notes.append(f"attention on {sizes} numbers was too large for {left_out}; call one by its name to insist")
        methods = fit
        slow = ", ".join(m.name for m in fit if not m.quick and m.refusal(centre.network) is None)
        quick = [method for method in fit if method.quick]
        if slow and centre.deadline == math.inf and any(m.refusal(centre.network) is None for m in quick):
            unfinished.append(
                f"{slow} may reach farther, but takes minutes for attention on {sizes} numbers, and was not tried; "
                "best goes on to it if seconds_per_input (--seconds-per-input) says for how long"
            )
            methods = quick
    # The later ones usually reach farther.
    methods = [m for m in methods if m.quick] + [m for m in reversed(methods) if not m.quick]
    # Those that name another in `instead` come after it.
    methods = [m for m in methods if not _replaced(m, centre)] + [m for m in methods if _replaced(m, centre)]
    if threat.boxed:
        # First those that bound margins over boxes; with a deadline after the quick one, which answers in any time.
        boxed = [m for m in methods if "box" in m.shapes and m.refusal(centre.network) is None]
        first = [m for m in methods if m.quick] if centre.deadline < math.inf else []
        boxed = first + [method for method in boxed if method not in first]
        methods = boxed + [method for method in methods if method not in boxed]
    return methods, notes, unfinished


def _all_proved(centre: Centre, known: Float64[Tensor, " b"] | None) -> bool:
    """Whether every input that has a lead has a radius."""
    return known is not None and bool(((known > 0) | ~(centre.margin > 0)).all())


def _hopeless(centre: Centre, known: Float64[Tensor, " b"], threat: Threat) -> bool:
    """Whether the balls around boxes of the known radii are so large that first order alone takes all margins."""
    reach = centre.first_order_radius / math.sqrt(centre.x[0].numel())
    known = torch.where(centre.margin > 0, known, torch.inf)  # where nothing leads, there is nothing to find
    return bool((known >= (reach if threat.clip is None else 2 * reach)).all())  # clipping may halve a box


def _replaced(method: NetworkMethod, centre: Centre) -> bool:
    """Whether another composition that applies is to be used instead."""
    if method.instead is None:
        return False
    other = compositions[method.instead]
    return other.refusal(centre.network) is None and centre.x[0].numel() <= other.most_inputs


def _large(centre: Centre) -> str | None:
    """The tokens and width at the first attention on many numbers, or None."""
    shapes = (s.u.shape[-2:] for stage in centre.stages for s in stage.sites if isinstance(s.piece, Attention))
    return next((f"{n}x{d}" for n, d in shapes if n * d > _MANY), None)
