"""What is known about one layer: norms, bounds, slopes, attacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from holdfast.reporting import Shown
from holdfast.results.kinds import Guarantee, Scope, Side, brief, plain


@dataclass(frozen=True, repr=False)
class NormResult(Shown):
    """The largest singular value of a batch of linear maps.

    Attributes:
        value: (b…) the norm.
        side: "estimate" (approached from below) or "upper".
        guarantee: "proved" for an upper value, "numerical" for an estimate.
        residual: (b…) ‖Jᵀu - σv‖ for an estimate: some singular value lies within it of `value`;
            for an upper value, its distance to the estimate that it started from.
        iterations: steps of the iteration, or trial shifts of the proof.
        left: (b…, codomain…) left singular vector of an estimate.
        right: (b…, domain…) right singular vector of an estimate.
        seconds: wall time.
    """

    value: Tensor
    side: Side
    guarantee: Guarantee
    residual: Tensor
    iterations: int
    left: Tensor | None = field(default=None, repr=False)
    right: Tensor | None = field(default=None, repr=False)
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        return {"value": brief(self.value), "side": self.side, "guarantee": self.guarantee}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the vectors, ready for JSON."""
        names = ("value", "side", "guarantee", "residual", "iterations", "seconds")
        return {name: plain(getattr(self, name)) for name in names}


@dataclass(frozen=True, repr=False)
class BoundResult(Shown):
    """How far the output of a layer can move.

    Attributes:
        value: (b…) for one eps, (b…, e) for e of them.
        eps: the radius, or the radii, as given.
        terms: the named quantities of the formula; shapes begin with (b…) unless it is a quantity of the weights
            alone, then (h) where it is a head's, then (e) where it depends on eps.
        notes: remarks of the method: which one won, what did not apply.
    """

    value: Tensor
    method: str
    eps: float | tuple[float, ...]
    side: Side
    scope: Scope
    guarantee: Guarantee
    terms: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        return {"value": brief(self.value), "eps": brief(self.eps), "method": self.method, "guarantee": self.guarantee}

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        fields = {name: plain(value) for name, value in vars(self).items() if name != "terms"}
        return fields | {"terms": {name: plain(term) for name, term in self.terms.items()}}


@dataclass(frozen=True, repr=False)
class LipschitzResult(Shown):
    """How steep a layer can be. It says nothing about how far the output moves in a ball around a point.

    Attributes:
        value: (b…) at points; () or (r) on balls around 0.
        scope: "point": the norm of the Jacobian there and nowhere else; "ball at 0": the Lipschitz constant on
            sequences of `tokens` tokens of length at most `radius`, for the W_p distance without a mask and token-wise,
            (Σ_i |x_i - y_i|^p)^{1/p}, otherwise.
        radius: the radius, or the radii, as given; None at points, like `tokens` and `p`.
        terms: the named quantities of the formula.
        notes: remarks of the method: which one won, what did not apply.
    """

    value: Tensor
    method: str
    side: Side
    scope: Scope
    guarantee: Guarantee
    terms: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()
    radius: float | tuple[float, ...] | None = None
    tokens: int | None = None
    p: float | None = None
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        shown: dict[str, object] = {"value": brief(self.value), "scope": self.scope, "method": self.method}
        return shown | {"guarantee": self.guarantee}

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, which has no infinity."""
        fields = {name: plain(value) for name, value in vars(self).items() if name != "terms"}
        fields["p"] = "inf" if self.p == float("inf") else self.p
        return fields | {"terms": {name: plain(term) for name, term in self.terms.items()}}


@dataclass(frozen=True, repr=False)
class AttackResult(Shown):
    """A perturbation that was found, and what it does.

    Attributes:
        lower: (b…), or (b…, h) where heads are attacked separately, then (e) for e radii: the value at the witness,
            rounded down.
        witness: (b…, n, d) the perturbed input X', with heads and radii before n as in `lower`; its distance from X
            is at most eps.
        objective: what was maximised.
    """

    lower: Tensor
    witness: Tensor = field(repr=False)
    objective: str
    eps: float | tuple[float, ...]
    guarantee: Guarantee
    side: Side = "lower"
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        return {"lower": brief(self.lower), "eps": brief(self.eps), "objective": self.objective}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness, ready for JSON."""
        return {name: plain(value) for name, value in vars(self).items() if name != "witness"}


@dataclass(frozen=True, repr=False)
class LipschitzWitness(Shown):
    """Tokens at which a layer is steep, and the direction in which it is.

    Attributes:
        lower: () ‖DF(X)G‖ / ‖G‖ at the witness X in the direction G, rounded down where the guarantee is "proved".
        witness: (n, d) the tokens X, none longer than `radius`.
        direction: (n, d) the direction G.
        guaranteed: what the construction promises by a closed formula; None for a point found by search.
        weights: (n) weights μ of the tokens, whose metric is Σ_i μ_i |·|²; None where all count equally.
        origin: where the witness comes from.
    """

    lower: Tensor
    witness: Tensor = field(repr=False)
    direction: Tensor = field(repr=False)
    radius: float
    origin: str
    guarantee: Guarantee
    guaranteed: float | None = None
    weights: Tensor | None = field(default=None, repr=False)
    side: Side = "lower"
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        return {"lower": brief(self.lower), "radius": self.radius, "origin": self.origin}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness and its direction, ready for JSON."""
        return {name: plain(value) for name, value in vars(self).items() if name not in ("witness", "direction")}
