"""What a network is made of: pieces that map tokens to tokens and say how steep and how curved they are on a ball.

Every tensor has two trailing dimensions, tokens (…, n, d); an image is (…, channels, pixels). Tangents are stacked in
front: `a` of shape (t…, …, n, d) belongs to `u` of shape (…, n, d). Formulas are written once, for tensors and balls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, final

from torch import Tensor

from holdfast.bounds.base import Need as Need
from holdfast.errors import NotApplicableError
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.tokens.rows import Rows
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions


class Piece(ABC):
    """A map f of tokens (…, n, d) to tokens (…, m, c)."""

    @abstractmethod
    def value(self, u: Array) -> Array:
        """f(u)."""

    @abstractmethod
    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """How far f moves: a bound (…, e) of ‖f(u + δ) - f(u)‖_F over ‖δ‖_F <= rho, rho (…, e) or (e).

        The bound does not decrease with rho.
        """

    #: Whether every token of the output is the same function of the token in its place.
    tokenwise: ClassVar[bool] = False

    #: Whether the output has tokens of its own, chosen or pooled from those that enter.
    pools: ClassVar[bool] = False

    def rows_behind(self, rows: Rows, n: int) -> Rows | None:
        """Which of n tokens these of the output depend on, sorted; None where it may be all of them."""
        return rows if self.tokenwise else None

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        """What serves on the sorted tokens `rows` alone; if the piece pools, for the tokens `needed` of its output."""
        return (self,)

    def with_identity(self) -> Piece | None:
        """The piece plus the identity, where the two are bounded together better than apart."""
        return None

    #: Whether constants on balls cost many norms: they are used only where derivatives at the centre say little.
    costly: ClassVar[bool] = False

    def held_numbers(self, u: Tensor) -> int:
        """Roughly the size of the largest tensor that `reach` needs for one input u (1, n, d), in numbers."""
        return u.numel()

    def reach_for(self, need: Need) -> Callable[[Arithmetic[Any], Tensor, Any], Any]:
        """`reach` by the bounds for a need, if the piece has several."""
        return self.reach

    def without_expansion(self) -> str | None:
        """Why the piece has no expansion, or None where it is linear or has one."""
        return f"{type(self).__name__} has no expansion"

    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion | None:
        """The piece as a polynomial around u (b, n, d), with a bound of the rest; None for a linear piece."""
        raise NotApplicableError(f"{type(self).__name__} has no expansion")


class SmoothPiece(Piece):
    """A piece with two continuous derivatives, and bounds of both on a ball."""

    @abstractmethod
    def push(self, u: Array, a: Array) -> Array:
        """Df(u)[a]."""

    @abstractmethod
    def pull(self, u: Array, c: Array) -> Array:
        """Df(u)ᵀ[c]: the adjoint of `push`."""

    @abstractmethod
    def push2(self, u: Array, a: Array, b: Array) -> Array:
        """D²f(u)[a, b]."""

    @abstractmethod
    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        """D²f(u)[a, ·]ᵀ[c]: the derivative of `pull(u, c)` along a."""

    @abstractmethod
    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """L(rho) (…, e): a bound of ‖Df(u + δ)‖ over ‖δ‖_F <= rho; it does not decrease with rho."""

    def slope(self, a: Arithmetic[Array], u: Tensor) -> Array | None:
        """‖Df(u)‖ (…), where it costs less than `gain` on a small ball; None where it does not."""
        return None

    @abstractmethod
    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """β(rho) (…, e): a bound of sup ‖D²f(u + δ)[g, g]‖_F over unit g and ‖δ‖_F <= rho; it does not decrease."""


class LinearPiece(SmoothPiece):
    """An affine map: `push` does not depend on where, and there is no curvature."""

    @final
    def without_expansion(self) -> str | None:
        return None

    @final
    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion | None:
        return None

    @abstractmethod
    def norm(self, a: Arithmetic[Array]) -> Array:
        """The norm of the linear part, a scalar."""

    @abstractmethod
    def push(self, u: Array, a: Array) -> Array: ...

    @abstractmethod
    def pull(self, u: Array, c: Array) -> Array: ...

    @final
    def push2(self, u: Array, a: Array, b: Array) -> Array:
        return self.push(u, a * b * 0.0)

    @final
    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        return a * 0.0

    @final
    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self.norm(a) + rho * 0.0

    @final
    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * 0.0

    @final
    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self.norm(a) * rho
