"""Functions of one variable, applied entry by entry, as a model writes them: recognised by their formula.

Whatever sums and products a model uses, a formula becomes one polynomial in x and in functions of such polynomials, and
that is compared with the formulas of the activations that are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

from holdfast.graph.values import Moving
from holdfast.layers.activation.base import Activation
from holdfast.layers.activation.functions import LeakyRelu, activations

#: A factor is x, or the name of a function with its argument; a monomial is its factors with their powers, sorted.
Factor = tuple[str, "Polynomial | None"]
Monomial = tuple[tuple[Factor, int], ...]

_CLOSE = 1e-15  # coefficients are the same if they differ by rounding alone


@final
@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with coefficients, the number 1 being the empty monomial."""

    terms: tuple[tuple[Monomial, float], ...]

    @classmethod
    def of(cls, terms: Mapping[Monomial, float]) -> Polynomial:
        return cls(tuple(sorted(((m, c) for m, c in terms.items() if c), key=repr)))

    @classmethod
    def number(cls, c: float) -> Polynomial:
        return cls.of({(): c})

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, c in other.terms:
            terms[monomial] = terms.get(monomial, 0.0) + c
        return Polynomial.of(terms)

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms: dict[Monomial, float] = {}
        for left, c in self.terms:
            for right, d in other.terms:
                powers = dict(left)
                for factor, power in right:
                    powers[factor] = powers.get(factor, 0) + power
                monomial = tuple(sorted(powers.items(), key=repr))
                terms[monomial] = terms.get(monomial, 0.0) + c * d
        return Polynomial.of(terms)

    @property
    def composed(self) -> bool:
        """Whether some function other than x stands in it."""
        return any(name != "x" for monomial, _ in self.terms for (name, _), _ in monomial)

    def scaled(self, c: float, *, divide: bool = False) -> Polynomial:
        return Polynomial.of({m: d / c if divide else d * c for m, d in self.terms})

    def at(self, s: float) -> Polynomial:
        """The formula in s x in the place of x."""
        if s == 1:
            return self
        total = Polynomial(())
        for monomial, c in self.terms:
            for (name, _), power in monomial:
                c *= s**power if name == "x" else 1.0
            factors = (((name, argument and argument.at(s)), power) for (name, argument), power in monomial)
            total += Polynomial.of({tuple(sorted(factors, key=repr)): c})
        return total


X = Polynomial.of({((("x", None), 1),): 1.0})


def function(name: str, argument: Polynomial) -> Polynomial:
    """A function of one variable, by its name, of a polynomial."""
    return Polynomial.of({(((name, argument), 1),): 1.0})


@final
@dataclass(frozen=True, eq=False)
class EntryFormula:
    """A formula in the entries of a tensor."""

    value: Moving
    formula: Polynomial


@final
@dataclass(frozen=True)
class Recognised:
    """formula(x) = beside · x + after · φ(before · x) + constant."""

    phi: Activation
    before: float = 1.0
    after: float = 1.0
    constant: float = 0.0
    beside: float = 0.0


def recognise(formula: Polynomial) -> Recognised | None:
    """The activation whose formula this is, if it is known."""
    terms, constant = _split(formula)
    bare = Polynomial.of(dict(terms))
    for phi, known in _known():
        factors = _multiple(bare, known)
        if factors is not None:
            return Recognised(phi, *factors, constant)
    return _logistic(formula) or _leaky(formula) or _beside(formula)


def rising(formula: Polynomial) -> bool:
    """Whether it is known to be a function that never falls."""
    known = recognise(formula)
    if known is None or known.beside < 0:
        return False
    return min(known.phi.all_slopes) >= 0 and known.before * known.after >= 0


def _multiple(formula: Polynomial, known: Polynomial) -> tuple[float, float] | None:
    """(s, a), where the formula is a · known(s x)."""
    slope, reference = _inner(formula), _inner(known)
    if not slope or not reference:
        return None
    s = slope / reference
    turned = known.at(s)
    coefficients = [_by_shape(p)[0][1] for p in (formula, turned)]
    a = coefficients[0] / coefficients[1]
    return (s, a) if _alike(formula, turned.scaled(a)) else None


def _inner(formula: Polynomial) -> float | None:
    """The coefficient of x in what the first function in a formula is of."""
    arguments = [argument for m, _ in _by_shape(formula) for (_, argument), _ in m if argument is not None]
    return dict(arguments[0].terms).get(X.terms[0][0]) if arguments else None


def _known() -> list[tuple[Activation, Polynomial]]:
    half, one = X.scaled(0.5), Polynomial.number(1.0)
    cubic = X + (X * X * X).scaled(0.044715)
    formulas = {
        "relu": function("relu", X),
        "abs": function("abs", X),
        "tanh": function("tanh", X),
        "gelu": half * (one + function("erf", X.scaled(math.sqrt(0.5)))),
        "gelu-tanh": half * (one + function("tanh", cubic.scaled(math.sqrt(2 / math.pi)))),
        "silu": X * function("sigmoid", X),
    }
    return [(activations[name], formula) for name, formula in formulas.items()]


def _alike(a: Polynomial, b: Polynomial) -> bool:
    """Whether two formulas are the same up to the rounding of their coefficients."""
    if len(a.terms) != len(b.terms):
        return False
    return all(
        abs(c - d) <= _CLOSE * 8 * abs(d) and _alike_factors(m, n)
        for (m, c), (n, d) in zip(_by_shape(a), _by_shape(b), strict=True)
    )


def _alike_factors(a: Monomial, b: Monomial) -> bool:
    if len(a) != len(b):
        return False
    for ((name, inner), power), ((other, argument), times) in zip(a, b, strict=True):
        if name != other or power != times or (inner is None) != (argument is None):
            return False
        if inner is not None and argument is not None and not _alike(inner, argument):
            return False
    return True


def _by_shape(p: Polynomial) -> list[tuple[Monomial, float]]:
    """The terms sorted by the names and powers in them, whatever the coefficients."""
    return sorted(p.terms, key=lambda term: _shape(term[0]))


def _shape(monomial: Monomial) -> str:
    return repr(
        [
            (name, power, argument and [_shape(m) for m, _ in _by_shape(argument)])
            for (name, argument), power in monomial
        ]
    )


def _slope(argument: Polynomial | None) -> float | None:
    """c, where the argument is c x."""
    if argument is None or len(argument.terms) != 1 or argument.terms[0][0] != X.terms[0][0]:
        return None
    return argument.terms[0][1]


def _split(formula: Polynomial) -> tuple[list[tuple[Monomial, float]], float]:
    """The terms without the number, and the number."""
    return [term for term in formula.terms if term[0]], dict(formula.terms).get((), 0.0)


def _function(formula: Polynomial, name: str) -> tuple[float, float, float] | None:
    """(a, c, b), where the formula is a f(c x) + b."""
    terms, constant = _split(formula)
    if len(terms) != 1 or len(terms[0][0]) != 1:
        return None
    ((called, argument), power), a = terms[0][0][0], terms[0][1]
    c = _slope(argument)
    return None if called != name or power != 1 or c is None else (a, c, constant)


def _logistic(formula: Polynomial) -> Recognised | None:
    """A σ(c x) + b = a/2 tanh(c x/2) + a/2 + b; c is halved exactly."""
    coefficients = _function(formula, "sigmoid")
    if coefficients is None:
        return None
    a, c, b = coefficients
    return Recognised(activations["tanh"], c / 2, a / 2, a / 2 + b)


def _leaky(formula: Polynomial) -> Recognised | None:
    """S x + t relu(x), as a leaky relu of slope in [-1, 1]: s + t times that of slope s/(s + t), or mirrored."""
    terms, constant = _split(formula)
    by_name = {m[0][0][0]: (m, c) for m, c in terms if len(m) == 1 and m[0][1] == 1}
    if by_name.keys() != {"x", "relu"} or len(terms) != 2 or by_name["relu"][0][0][0][1] != X:
        return None
    s, t = by_name["x"][1], by_name["relu"][1]
    if abs(s) <= abs(s + t):
        return Recognised(LeakyRelu(s / (s + t)), 1.0, s + t, constant)
    return Recognised(LeakyRelu((s + t) / s), -1.0, -s, constant)


def _beside(formula: Polynomial) -> Recognised | None:
    """A multiple of x beside an activation, which may hold one itself, as gelu does."""
    linear, rest = _without_x(formula)
    terms, constant = _split(rest)
    for phi, known in _known():
        own, bare = _without_x(known)
        factors = _multiple(Polynomial.of(dict(terms)), bare)
        if factors is not None:
            s, a = factors
            return Recognised(phi, s, a, constant, linear - a * s * own)
    logistic = _logistic(rest)
    return None if logistic is None else replace(logistic, beside=linear)


def _without_x(formula: Polynomial) -> tuple[float, Polynomial]:
    """The coefficient of x, and the formula without that term."""
    terms = dict(formula.terms)
    return terms.pop(X.terms[0][0], 0.0), Polynomial.of(terms)


#: Functions of one variable by the name of the operator, where no argument changes them.
FUNCTIONS: dict[str, Callable[[Polynomial], Polynomial]] = {
    "relu": lambda p: function("relu", p),
    "tanh": lambda p: function("tanh", p),
    "erf": lambda p: function("erf", p),
    "sigmoid": lambda p: function("sigmoid", p),
    "abs": lambda p: function("abs", p),
    "silu": lambda p: p * function("sigmoid", p),
    "neg": lambda p: p.scaled(-1.0),
}
