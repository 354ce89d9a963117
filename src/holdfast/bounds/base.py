"""What every bound shares: it checks, promotes, evaluates, doubts and wraps; a method writes one hook."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar, final, get_args

import torch
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, checks
from holdfast.attention.movement import distance, movement
from holdfast.errors import HoldfastError, InputError, NotApplicableError, NotFiniteError, SoundnessError
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import down
from holdfast.method import Method
from holdfast.radii import GivenRadii, as_numbers, check_radii
from holdfast.registry import Registry
from holdfast.results import BoundResult, Guarantee, Scope, Side

#: A numerical value may lie this far below the truth: its norms are approached from below.
NUMERICAL_SLACK = 1e-4


ScoreTerm = Literal["rotary", "bias", "cap", "sinks", "norms"]
EVERY_TERM: tuple[ScoreTerm, ...] = get_args(ScoreTerm)

#: What attention in a network needs a bound for: to be the smallest at a few radii; to answer at any radius without the
#: norm of a map on all tokens, and alike for both guarantees; or to cost little next to radius 0.
Need = Literal["smallest", "quick", "near"]

_BEYOND_PROOF: dict[ScoreTerm, str] = {
    "rotary": "the layer has rotary positions, and the proof does not cover them",
    "bias": "the layer adds a bias to its scores, and the proof does not cover it",
    "cap": "the layer caps its scores, and the proof, which drops what shifts a whole row, does not cover it",
    "sinks": "the layer has sinks, and the proof, which needs rows that sum to 1, does not cover them",
    "norms": "the layer normalises queries or keys, and the proof, which needs linear ones, does not cover it",
}


def score_terms_of(layer: AttentionLayer) -> list[ScoreTerm]:
    """The terms of a layer's scores beyond QKᵀ."""
    normalised = not (layer.q_norm is None and layer.k_norm is None)
    present: dict[ScoreTerm, bool] = {
        "rotary": layer.rotary is not None,
        "bias": layer.score_bias is not None,
        "cap": layer.soft_cap is not None,
        "sinks": layer.sinks is not None,
        "norms": normalised,
    }
    return [term for term, there in present.items() if there]


@dataclass(frozen=True)
class Evaluation(Generic[Array]):
    """What a method computed: the bound (…, e) for e radii, and the named quantities it is made of."""

    value: Array
    terms: dict[str, Array]
    notes: tuple[str, ...] = ()


class LayerMethod(Method):
    """What every registered bound of a layer says about itself."""

    side: ClassVar[Side] = "upper"
    scope: ClassVar[Scope]
    guarantees: ClassVar[tuple[Guarantee, ...]] = ("proved", "numerical")
    score_terms: ClassVar[tuple[ScoreTerm, ...]] = ()  # terms of the scores for which there is a proof

    @final
    def refuse_score_terms(self, layer: AttentionLayer) -> str | None:
        """Names a term of the scores, beyond QKᵀ, for which the bound has no proof."""
        return next((_BEYOND_PROOF[term] for term in score_terms_of(layer) if term not in self.score_terms), None)

    @classmethod
    @final
    def check_guarantees(cls) -> None:
        """Refuses a class whose metadata is incomplete, or whose guarantees are not valid."""
        cls.check_metadata()
        if not set(cls.guarantees) <= set(get_args(Guarantee)):
            raise HoldfastError(f"{cls.__name__} lacks valid guarantees; expected some of {get_args(Guarantee)}")

    @final
    def check_call(self, guarantee: Guarantee, refusal: str | None) -> None:
        """Refuses a guarantee that is not offered, and a layer for which there is no proof."""
        if guarantee not in self.guarantees:
            raise InputError(f"guarantee is {guarantee!r}; {self.name} offers {' and '.join(self.guarantees)}")
        if refusal is not None:
            raise NotApplicableError(f"bound {self.name!r} does not apply: {refusal}")

    @final
    def withhold_below(self, attained: Tensor, value: Tensor, guarantee: Guarantee) -> None:
        """Withholds values below what is attained."""
        slack = NUMERICAL_SLACK if guarantee == "numerical" else 0.0
        if bool((attained > value * (1 + slack)).any()):
            raise SoundnessError(
                f"bound {self.name!r} returned a value below one that is attained; the value is withheld; "
                "please report the layer and the input"
            )


class MethodAtPoint(LayerMethod):
    """What every bound at a point of a layer says about itself: for which layers it has a proof."""

    @abstractmethod
    def _refusal(self, layer: AttentionLayer) -> str | None:
        """Why the bound has no proof for this layer, or None."""

    @final
    def refusal(self, layer: AttentionLayer) -> str | None:
        """Why the bound does not apply to the layer, or None where it does."""
        return self.refuse_score_terms(layer) or self._refusal(layer)


class Bound(MethodAtPoint):
    """An upper bound of ‖F(X') - F(X)‖_F over ‖X' - X‖_F <= eps.

    A method states its metadata and writes `_evaluate`.

    Attributes:
        in_best: whether `best` asks it; not if it is for layers that the other bounds are too expensive for.
        in_networks: what attention in a network asks it for: it takes radii of each input, and no other one that is
            asked for the same is always smaller.
        in_networks_with: a term of the scores without which it is not asked there.
        stands_in: whether it is asked where another bound has no proof: it has one for every layer.
    """

    scope: ClassVar[Scope] = "ball at x"
    in_best: ClassVar[bool] = True
    in_networks: ClassVar[tuple[Need, ...]] = ()
    in_networks_with: ClassVar[ScoreTerm | None] = None
    stands_in: ClassVar[bool] = False

    @abstractmethod
    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        """The formula, in the arithmetic `a`: x is float64 (…, n, d), eps holds the radii (e).

        Inside a network each input has radii of its own, (…, e).
        """

    def held_numbers(self, layer: AttentionLayer, tokens: int) -> int:
        """About how many numbers its largest tensor has for one input, beside what the layer itself holds."""
        return 0

    @final
    def __call__(
        self,
        layer: AttentionLayer,
        x: Tensor,
        eps: GivenRadii,
        *,
        guarantee: Guarantee = "proved",
        memory_limit: float = 8 * GIB,
    ) -> BoundResult:
        """Evaluates the bound.

        Args:
            layer: the layer.
            x: (…, n, d) the points, float32 or float64; computed in float64.
            eps: one radius, or a sequence of them.
            guarantee: "proved" or "numerical".
            memory_limit: bytes that one proved norm may use.
        """
        began = time.perf_counter()
        checks.input(layer, x)
        eps = as_numbers(eps)
        radii = check_radii(eps)
        self.check_call(guarantee, self.refusal(layer))
        layer, x = layer.double(), x.detach().double()
        with torch.no_grad():
            try:
                if guarantee == "proved":
                    value, terms, notes = self._run(Proved(memory_limit), layer, x, radii)
                else:
                    value, terms, notes = self._run(Numerical(), layer, x, radii)
            except NotFiniteError:
                if not _may_break(layer):
                    raise
                raise self._overflow(layer, radii) from None
            self._doubt(layer, x, radii, value, guarantee)
        scalar = not isinstance(eps, Sequence)
        return BoundResult(
            value=value.squeeze(-1) if scalar else value,
            method=self.name,
            eps=radii[0] if scalar else tuple(radii),
            side=self.side,
            scope=self.scope,
            guarantee=guarantee,
            terms=terms,
            notes=notes,
            seconds=time.perf_counter() - began,
        )

    def _run(
        self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, radii: list[float]
    ) -> tuple[Tensor, dict[str, Tensor], tuple[str, ...]]:
        evaluation = self._evaluate(a, layer, x, a.lift(x.new_tensor(radii)))
        terms = {name: a.number(term) for name, term in evaluation.terms.items()}
        return a.number(evaluation.value), terms, evaluation.notes

    def _doubt(self, layer: AttentionLayer, x: Tensor, radii: list[float], value: Tensor, guarantee: Guarantee) -> None:
        """Withholds a value that is not finite, or that one ascent direction already exceeds."""
        if not bool(torch.isfinite(value).all()):
            raise self._overflow(layer, radii)
        jacobian = AttentionJacobian(layer, x)
        start = torch.randn(x.shape[-2:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        direction = jacobian.rmv(jacobian.mv(start.to(x).expand_as(x)))
        length = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True)
        radius = down(x.new_tensor(radii).reshape(-1, *(1 for _ in x.shape)), 1e-9)
        moved = x + radius * direction / torch.where(length > 0, length, torch.inf)
        inside = distance(x, moved).upper <= x.new_tensor(radii).reshape(-1, *(1 for _ in x.shape[:-2]))
        attained = torch.where(inside, movement(layer, x, moved).lower, 0.0).movedim(0, -1)
        self.withhold_below(attained, value, guarantee)

    def _overflow(self, layer: AttentionLayer, radii: list[float]) -> NotFiniteError:
        where = f"bound {self.name!r} has no finite value at eps={max(radii):g}"
        if _may_break(layer):
            reason = "a norm of queries or keys has eps 0, and breaks where what it divides by vanishes"
            return NotFiniteError(f"{where}: {reason}; use a smaller eps")
        return NotFiniteError(f"{where}: it overflowed float64; use a smaller eps")


def _may_break(layer: AttentionLayer) -> bool:
    """Whether a norm of queries or keys is not continuous where what it normalises vanishes."""
    return any(norm is not None and norm.eps == 0 for norm in (layer.q_norm, layer.k_norm))


bounds: Registry[Bound] = Registry("method", group="holdfast.bounds")

B = TypeVar("B", bound=type[Bound])


def register_bound(cls: B) -> B:
    """Class decorator that registers a bound under its `name`."""
    cls.check_guarantees()
    bounds.add(cls.name)(cls())
    return cls
