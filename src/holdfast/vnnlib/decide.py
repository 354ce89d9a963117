"""Whether a network meets a specification: a proof, a counter-example, or neither within the time limit."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.compositions import compositions, forms
from holdfast.errors import HoldfastError, InputError, MemoryLimitError, NotApplicableError, TimeLimitError
from holdfast.executors import Emit, Processes, Task, Work
from holdfast.graph import to_network
from holdfast.graph.onnx import OnnxModel
from holdfast.layers.linear.piece import Affine
from holdfast.linalg.rounding import frobenius_upper, up
from holdfast.network.centre import Centre
from holdfast.network.network import Head, Network
from holdfast.usage import processor_seconds
from holdfast.vnnlib.search import Search
from holdfast.vnnlib.specification import Box, Specification

#: "unsat": no input of a box has outputs in one of its cases, which is proved; "sat": some input has, and it is shown.
Verdict = Literal["unsat", "sat", "unknown", "timeout"]


@final
@dataclass(frozen=True, eq=False)
class Decision:
    """The verdict on a specification.

    Attributes:
        verdict: as the competition names it.
        x: the counter-example, where there is one.
        y: what the model returns there.
        seconds: the time it took, by the requested clock.
        parts: into how many the boxes were divided for the proof, where there is one.
        losses: what was taken off the smallest margin of the box that was proved or given up last, by name; empty
            where the proof was cut short or has no such account.
    """

    verdict: Verdict
    x: Float64[Tensor, " inputs"] | None = None
    y: Float64[Tensor, " outputs"] | None = None
    seconds: float = 0.0
    parts: int = 0
    losses: dict[str, float] = field(default_factory=dict)

    def to_text(self) -> str:
        """The verdict, and the counter-example as assignments, in the competition's format."""
        if self.x is None or self.y is None:
            return f"{self.verdict}\n"
        pairs = [f"({name}_{i} {v!r})" for name, t in (("X", self.x), ("Y", self.y)) for i, v in enumerate(t.tolist())]
        return f"{self.verdict}\n({chr(10).join(pairs)})\n"


def decide(
    model: Network | nn.Module,
    specification: Specification,
    *,
    shape: Sequence[int] | None = None,
    timeout: float | None = None,
    processor_time: bool = False,
    search: Search | None = None,
    seed: int = 0,
) -> Decision:
    """Searches for a counter-example, then for a proof that there is none.

    A counter-example counts if the model itself satisfies a case there: for an ONNX file, as onnxruntime executes it. A
    proof is about the network in exact arithmetic.

    Args:
        model: a classifier that `to_network` reads, or a `Network`.
        specification: what `read_specification` returns.
        shape: of one input, whose numbers in a row are X_0, X_1, …; by default what an ONNX file says.
        timeout: seconds; the proof runs in a process of its own, which is then ended, and may divide boxes into parts
            while there is time. None for no limit, and no parts.
        processor_time: count processor time, over all cores together, instead of wall time, so that other work on the
            machine matters little.
        search: how counter-examples are searched for.
        seed: for everything random.

    Example:
        >>> decide(OnnxModel("model.onnx"), read_specification("property.vnnlib"), timeout=100).verdict
        'unsat'
    """
    clock = processor_seconds if processor_time else time.monotonic
    began = clock()
    if timeout is not None and not timeout > 0:
        raise InputError(f"timeout is {timeout:g}; expected a positive number of seconds")
    deadline = math.inf if timeout is None else began + timeout
    if not specification.boxes:
        return Decision("unsat", seconds=clock() - began)  # there is no input at all
    asked = _enter(model, specification, shape)
    for box in specification.boxes:
        for x in (search or Search())(asked.outputs, box, seed, lambda: clock() > deadline):
            candidate = _stored(x, box)
            y = asked.executed(candidate)
            if any(bool((case.excess(y) <= 0).all()) for case in box.cases):
                return Decision("sat", candidate, y, clock() - began)
    questions = list(asked.questions(specification))
    proof = None
    left = deadline - clock()
    if left > 0:
        proof = _all_lead(questions) if timeout is None else _in_time(questions, left, processor_time)
    seconds = clock() - began
    if proof is None:
        return Decision("timeout", seconds=seconds)
    return Decision("unsat" if proof.parts else "unknown", seconds=seconds, parts=proof.parts, losses=proof.losses)


def _stored(x: Tensor, box: Box) -> Tensor:
    """The point in float32, as models take it, where that is inside the box."""
    return x.float().double().clamp(box.lower, box.upper)


# -- the model


@final
@dataclass(frozen=True)
class _Asked:
    """A network, and how the numbers of a specification enter it and its model."""

    network: Network
    size: tuple[int, ...]
    execute: Callable[[Tensor], Tensor]

    def outputs(self, x: Float64[Tensor, "b inputs"]) -> Float64[Tensor, "b outputs"]:
        """What the network computes."""
        outputs: Tensor = self.network(x.reshape(-1, *self.size))
        return outputs

    def executed(self, x: Float64[Tensor, " inputs"]) -> Float64[Tensor, " outputs"]:
        """What the model itself returns."""
        with torch.no_grad():
            return self.execute(x.unsqueeze(0))[0].double()

    def questions(self, specification: Specification) -> Iterator[_Question]:
        """For every box: of each case, the inequality that is farthest from holding at the box's centre."""
        for box in specification.boxes:
            with torch.no_grad():
                y = self.outputs(((box.lower + box.upper) / 2).unsqueeze(0))[0]
            rows = [int(case.excess(y).argmax()) for case in box.cases]
            A = torch.stack([case.A[row] for case, row in zip(box.cases, rows, strict=True)])
            c = torch.stack([case.c[row] for case, row in zip(box.cases, rows, strict=True)])
            yield _Question(_leading(self.network, A, c), box.lower.reshape(self.size), box.upper.reshape(self.size))


def _enter(model: Network | nn.Module, specification: Specification, shape: Sequence[int] | None) -> _Asked:
    if shape is None:
        if not isinstance(model, OnnxModel):
            raise InputError("shape is missing; expected the shape of one input, unless the model is an ONNX file")
        shape = _file_shape(model, specification.inputs)
    if math.prod(shape) != specification.inputs:
        raise InputError(
            f"the specification has {specification.inputs} inputs X_i, and an input of the model has shape "
            f"{tuple(shape)}; expected as many numbers"
        )
    box = specification.boxes[0]
    centre = ((box.lower + box.upper) / 2).reshape(1, *shape)
    if isinstance(model, Network):
        asked = _Asked(model, tuple(shape), lambda x: model(x.reshape(-1, *shape)))
    else:
        converted = to_network(model, centre)
        size = tuple(converted.encode(centre).shape[1:])
        asked = _Asked(converted.network, size, _executor(model, shape))
    returned = asked.outputs(centre.reshape(1, -1)).shape[-1]
    if returned != specification.outputs:
        raise InputError(f"the specification has {specification.outputs} outputs Y_j, and the model returns {returned}")
    return asked


def _file_shape(model: OnnxModel, inputs: int) -> tuple[int, ...]:
    if len(model.shapes) != 1:
        raise InputError(f"{model.name} takes {len(model.shapes)} inputs; expected one, whose numbers are X_0, X_1, …")
    sizes = model.shapes[0][1:]
    known = math.prod(size for size in sizes if size is not None)
    if sum(size is None for size in sizes) > 1:
        raise InputError(f"{model.name} leaves several sizes of its input open; pass shape")
    return tuple(inputs // known if size is None else size for size in sizes)


def _executor(model: nn.Module, shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    if isinstance(model, OnnxModel):
        return lambda x: model.executed(x.reshape(-1, *shape))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return lambda x: model(x.reshape(-1, *shape).to(dtype))


# -- the proof


@final
@dataclass(frozen=True)
class _Question:
    """Whether class 0 of a network leads everywhere in a box."""

    network: Network
    lower: Float64[Tensor, "n d"]
    upper: Float64[Tensor, "n d"]


def _leading(network: Network, A: Float64[Tensor, "j k"], c: Float64[Tensor, " j"]) -> Network:
    """A network whose class 0 leads class j by A_j y - c_j, y what the given one returns; no weight is rounded."""
    last = Affine(network.head.weight.mT.contiguous(), network.head.bias)
    zero = A.new_zeros(1, A.shape[1])
    return Network((*network.stages, last), Head(torch.cat([zero, -A]), torch.cat([c.new_zeros(1), c])), network.name)


@final
@dataclass(frozen=True)
class LeadProof:
    """How a proof that class 0 leads on a box went.

    Attributes:
        parts: into how many the box was divided; 0 where nothing is proved.
        losses: what was taken off the smallest margin, by name; empty where that is not known.
    """

    parts: int = 0
    losses: dict[str, float] = field(default_factory=dict)


def leads_everywhere(
    network: Network,
    lower: Float64[Tensor, "n d"],
    upper: Float64[Tensor, "n d"],
    seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> LeadProof:
    """Tries to prove that class 0 has the largest logit everywhere in a box.

    Where every piece has quadratic forms, they bound the margins over the box itself (docs/math/forms.md), and over its
    parts as long as that may help in these seconds of the clock. Otherwise the compositions are asked for the ball
    around its centre that its corners touch.
    """
    x = (lower + upper) / 2
    half = up(torch.maximum(upper - x, x - lower)).clamp(min=0.0)
    radius = frobenius_upper(half.unsqueeze(0))
    centre = Centre(network, x.unsqueeze(0))
    if int(centre.prediction) != 0 or not bool(centre.margin > 0):
        return LeadProof()
    if not bool((upper > lower).any()):
        return LeadProof(1)
    try:
        if forms.refusal(network) is None:
            margins = forms.margins_over_parts(network, lower, upper, seconds, clock)
            leading = bool(margins.margins[0] == math.inf)  # class 0 is the one that leads
            return LeadProof(margins.parts if margins.least > 0 and leading else 0, margins.losses)
        radii = compositions["best"](centre, radius)
        return LeadProof(int(radii.radius >= radius), radii.losses[0] if radii.losses else {})
    except (NotApplicableError, MemoryLimitError):
        return LeadProof()


def _all_lead(
    questions: Sequence[_Question], seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> LeadProof:
    """The parts of all boxes, and the losses of the last; no parts where one of them is not proved."""
    parts, losses, deadline = 0, dict[str, float](), clock() + seconds
    for question in questions:
        left = max(0.0, deadline - clock())
        proof = leads_everywhere(question.network, question.lower, question.upper, left, clock)
        if not proof.parts:
            return proof
        parts, losses = parts + proof.parts, proof.losses
    return LeadProof(parts, losses)


def _in_time(questions: Sequence[_Question], seconds: float, processor_time: bool) -> LeadProof | None:
    """The same in a process of its own; None where these seconds are over first."""
    proofs, deadline = list[LeadProof](), math.inf if processor_time else time.monotonic() + seconds
    with Processes().open(_Prove(), lambda values: proofs.extend(proof for _, proof in values), 1) as pool:
        pool.submit(0, _TimedQuestions(questions, seconds, processor_time))
        while not proofs and (left := deadline - time.monotonic()) > 0:
            for ended in pool.wait(None if processor_time else left):
                if ended.failure is None:
                    continue
                if isinstance(ended.failure.error, TimeLimitError):
                    return None
                raise ended.failure.error or HoldfastError(f"nothing is decided: {ended.failure.reason}")
    return proofs[0] if proofs else None


@final
@dataclass(frozen=True)
class _TimedQuestions:
    """Questions, and how many seconds there are for them, by the clock or of the processor."""

    questions: Sequence[_Question]
    seconds: float
    processor_time: bool


@final
class _Prove(Task[_TimedQuestions]):
    """Answers them; a process that works longer than it may is told so by the system."""

    def start(self) -> Work[_TimedQuestions]:
        def work(asked: _TimedQuestions, emit: Emit) -> None:
            if asked.processor_time:
                signal.signal(signal.SIGXCPU, _time_is_over)
                most = math.ceil(processor_seconds() + asked.seconds)
                resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
            clock = processor_seconds if asked.processor_time else time.monotonic
            emit(_all_lead(asked.questions, asked.seconds, clock))

        return work


def _time_is_over(*_: object) -> NoReturn:
    raise TimeLimitError("the processor has worked on this proof for as long as it may")
