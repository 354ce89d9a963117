"""Covectors at one token of a normalisation's output, and what the residual stream's rest does to them.

The output moves by scale ⊙ (w - n a + z) with w = c P δ, a = n·w and z = n(g - 1 + a) + w(g - 1). Where a token's δ is
first order and a rest of at most φ, a covector κ there with m = scale ⊙ κ and m₀ = m·n has beyond first order at most

    ‖m - m₀n‖ cφ + |m₀| sup|g - 1 + a| + sup|m·w| (sup|a| + sup|g - 1 + a|)

(docs/math/forms.md, section 12).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.local import UNDERFLOW
from holdfast.linalg.rounding import up


@final
@dataclass(frozen=True)
class Singles:
    """Bounds (t, S) of |m₀|, ‖m - m₀n‖, ‖m‖, and of |m·w| to first order for scale 1, for S covectors at each token."""

    along: Tensor
    apart: Tensor
    size: Tensor
    v: Tensor


@final
@dataclass(frozen=True)
class TokenMoves:
    """What is known of t tokens at the last scale.

    Attributes:
        carried: c φ, how far the stream's rest moves w.
        tiny: what rounding adds to that of w and of a.
        w, rest: bounds of ‖w‖ to first order, and of what it has beyond.
        a: of |a|.
        beyond: of |g - 1 + a|.
        radius: of b.
    """

    carried: Tensor
    tiny: Tensor
    w: Tensor
    rest: Tensor
    a: Tensor
    beyond: Tensor
    radius: float

    @property
    def own(self) -> Tensor:
        """(t) bounds of ‖z‖, and of rounding."""
        return up(self.beyond + (self.w + self.rest) * (self.a + self.beyond) + self.tiny, 1e-12)

    def at(self, some: Tensor) -> TokenMoves:
        """Of some of the tokens."""
        names = ("carried", "tiny", "w", "rest", "a", "beyond")
        return replace(self, **{name: getattr(self, name)[some] for name in names})

    def of(self, singles: Singles) -> Float64[Tensor, "t S"]:
        """What these covectors have beyond first order."""
        carried, tiny, rest, a, beyond = (
            x.unsqueeze(-1) for x in (self.carried, self.tiny, self.rest, self.a, self.beyond)
        )
        v = self.radius * singles.v + singles.size * rest
        most = singles.apart * carried + singles.along * beyond + v * (a + beyond)
        return up(most + singles.size * tiny, 1e-11)


@final
@dataclass(frozen=True)
class NormalisedTokens:
    """Tokens (t) of a normalisation.

    Attributes:
        tokens: which.
        n: (t, d); `scale` (d); `c` (t) upper bounds.
        gram: (t, d, d) inner products of the first-order rows of w, and (t) the length of these.
        theta: to which all these are accurate.
    """

    tokens: Tensor
    n: Tensor
    scale: Tensor
    c: Tensor
    gram: Tensor
    length: Tensor
    theta: float

    def at(self, some: Tensor) -> NormalisedTokens:
        """Some of them."""
        tokens, n, c, gram, length = (x[some] for x in (self.tokens, self.n, self.c, self.gram, self.length))
        return NormalisedTokens(tokens, n, self.scale, c, gram, length, self.theta)

    @property
    def steep(self) -> float:
        """A bound of the norm of every token's derivative."""
        return up(float(self.scale.abs().amax()) * float(self.c.amax()), 1e-9)

    def singles(self, covectors: Float64[Tensor, "t S d"]) -> Singles:
        """Covectors at the output of these tokens."""
        m, theta = covectors * self.scale, 8 * self.theta
        size = up(torch.linalg.vector_norm(m, dim=-1), 1e-10) + 1e-150
        along = (m @ self.n.unsqueeze(-1)).squeeze(-1)
        apart = torch.linalg.vector_norm(m - along.unsqueeze(-1) * self.n.unsqueeze(1), dim=-1)
        square = ((m @ self.gram) * m).sum(-1).clamp(min=0.0)
        v = (square + theta * (size * self.length.unsqueeze(-1)).square()).sqrt()
        return Singles(up(along.abs() + theta * size, 1e-10), up(apart + theta * size, 1e-10), size, up(v, 1e-10))

    def carried(self, phi: Tensor, stream: Tensor, radius: float, moved: float) -> tuple[Tensor, Tensor]:
        """(t) bounds of what w has beyond first order, where the stream's rest is at most φ, and of rounding.

        `stream` (t) are lengths of the stream's first-order rows, of which those of w and a were computed as functions.
        """
        d = len(self.scale)
        lost = 32 * self.theta * radius * stream + 8 * self.theta * moved + UNDERFLOW
        return up(self.c * phi, 1e-12), up(self.c * lost * (d**0.5 + 1), 1e-12) + UNDERFLOW
