"""Two arithmetics for one formula: balls and proved norms, or float64 and iterated norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.device import waits
from holdfast.errors import TimeLimitError
from holdfast.linalg import Array, Ball, MatrixOperator, ProvableOperator, estimated_norm, thin_norm, upper
from holdfast.linalg.certified import GIB
from holdfast.results import Guarantee

T = TypeVar("T")

_THIN, _SQUARED = 32, 1024  # matrices of so few rows or columns are not worth an iteration, or not where it waits

#: What was computed from weights alone, as long as the first of them lives: by name, copies of the weights and result.
_KEPT: MutableMapping[Tensor, dict[tuple[str, Guarantee], tuple[list[Tensor], Any]]] = WeakIdKeyDictionary()


class Arithmetic(ABC, Generic[Array]):
    """How a bound computes. Formulas are non-decreasing in every norm, so an upper norm gives an upper value.

    One arithmetic serves one layer at one batch of inputs, so that methods can share what they have in common; `at`
    gives one to every layer of a network.

    Args:
        overdue: tells whether the time is over; no norm is begun from then on.
    """

    guarantee: Guarantee

    def __init__(self, overdue: Callable[[], bool] = bool) -> None:
        self.overdue = overdue
        self._shared: dict[str, tuple[Tensor | None, Any]] = {}
        self._layers: dict[int, tuple[object, Tensor, Arithmetic[Array]]] = {}

    @final
    def once(self, name: str, compute: Callable[[], T], radii: Tensor | None = None) -> T:
        """What `compute` gives, computed at the first call and kept under its name; anew where the radii are others."""
        if name not in self._shared or not _same(self._shared[name][0], radii):
            self._shared[name] = radii, compute()
        value: T = self._shared[name][1]
        return value

    @final
    def of_weights(self, name: str, weights: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """What `compute` gives, which depends on nothing but these weights: once for all inputs of a network.

        It is computed anew where a weight has changed since, in place or not.
        """
        kept = _KEPT.setdefault(weights[0], {})
        known = kept.get((name, self.guarantee))
        if known is None or not all(_same(copy, weight) for copy, weight in zip(known[0], weights, strict=True)):
            known = kept[name, self.guarantee] = [weight.detach().clone() for weight in weights], compute()
        value: T = known[1]
        return value

    @final
    def at(self, layer: object, x: Tensor) -> Arithmetic[Array]:
        """The arithmetic of the same kind that serves this layer at these inputs; the layer's last inputs are kept."""
        kept = self._layers.get(id(layer))
        if kept is None or kept[0] is not layer or kept[1] is not x:
            kept = self._layers[id(layer)] = layer, x, self._fresh()
        return kept[2]

    @final
    def in_time(self) -> None:
        """Gives up what would go beyond the deadline."""
        if self.overdue():
            raise TimeLimitError("the time for this input was over")

    @final
    def timed(self) -> AbstractContextManager[object]:
        """Inside, every operation on a tensor asks for the time first, so that no long work outlives its deadline."""
        return nullcontext() if self.overdue is bool else _Timed(self.in_time)

    @final
    def least(self, *bounds: Array) -> Array:
        """What is proved of something by several bounds: the smallest, also where others are infinite or no number."""
        values = (self.number(bound).nan_to_num(nan=torch.inf, posinf=torch.inf) for bound in bounds)
        return self.lift(torch.stack(list(values)).amin(0))

    @abstractmethod
    def _fresh(self) -> Arithmetic[Array]:
        """The same arithmetic with nothing kept."""

    @abstractmethod
    def lift(self, x: Tensor) -> Array:
        """A float64 tensor, taken as exact."""

    @abstractmethod
    def norm(self, operator: ProvableOperator, *, rough: bool = False) -> Array:
        """The largest singular value of every map in the batch; `rough` where it enters the result damped."""

    @abstractmethod
    def number(self, x: Array) -> Tensor:
        """What is reported of a result."""

    @abstractmethod
    def product(self, left: Array, right: Array) -> Array:
        """The product of left and right^T, (…, m, k) and (…, n, k) to (…, m, n), or to fewer columns by an isometry."""

    @abstractmethod
    def matrix_norm(self, matrix: Array, *, rough: bool = False) -> Array:
        """The spectral norm of matrices (…, m, n); `rough` as in `norm`."""


@final
class Proved(Arithmetic[Ball]):
    """Float64 with every rounding accounted for; norms by Gram matrix and Cholesky."""

    guarantee = "proved"

    def __init__(self, memory_limit: float = 8 * GIB, overdue: Callable[[], bool] = bool) -> None:
        super().__init__(overdue)
        self._memory_limit = memory_limit

    def _fresh(self) -> Proved:
        return Proved(self._memory_limit, self.overdue)

    def lift(self, x: Tensor) -> Ball:
        return Ball.exact(x)

    def norm(self, operator: ProvableOperator, *, rough: bool = False) -> Ball:
        self.in_time()
        return Ball.exact(upper(operator, memory_limit=self._memory_limit).value)

    def number(self, x: Ball) -> Tensor:
        return x.upper

    def matrix_norm(self, matrix: Ball, *, rough: bool = False) -> Ball:
        return self.norm(MatrixOperator(matrix))

    def product(self, left: Ball, right: Ball) -> Ball:
        return left @ right.mT


@final
class Numerical(Arithmetic[Tensor]):
    """Plain float64; norms by Lanczos, which approaches from below.

    Two singular values a relative distance δ apart that the iteration has not told apart leave a residual of about δ/2,
    which counts as an error of δ²/4: a tolerance of 1e-9 therefore keeps the value within 1e-4.
    """

    guarantee = "numerical"

    def __init__(
        self, tolerance: float = 1e-9, rough_tolerance: float = 1e-6, *, overdue: Callable[[], bool] = bool
    ) -> None:
        super().__init__(overdue)
        self._tolerance, self._rough_tolerance = tolerance, rough_tolerance

    def _fresh(self) -> Numerical:
        return Numerical(self._tolerance, self._rough_tolerance, overdue=self.overdue)

    def lift(self, x: Tensor) -> Tensor:
        return x

    def norm(self, operator: ProvableOperator, *, rough: bool = False) -> Tensor:
        self.in_time()
        return estimated_norm(operator, self._rough_tolerance if rough else self._tolerance)

    def number(self, x: Tensor) -> Tensor:
        return x

    def matrix_norm(self, matrix: Tensor, *, rough: bool = False) -> Tensor:
        if min(matrix.shape[-2:]) > (_SQUARED if waits(matrix.device) else _THIN):
            return self.norm(MatrixOperator(matrix), rough=rough)
        return thin_norm(matrix)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        thin = right if right.shape[-1] >= right.shape[-2] else torch.linalg.qr(right, mode="r").R
        return left @ thin.mT


@final
class _Timed(TorchFunctionMode):
    """Operations on tensors that give up when the time is over."""

    def __init__(self, in_time: Callable[[], None]) -> None:
        super().__init__()
        self._in_time = in_time

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):  # never where a mode such as no_grad ends, which must end
            self._in_time()
        return func(*args, **(kwargs or {}))


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))
