"""Recognises attention that a model writes out itself: softmax(scale · Q Kᵀ + mask) V, one torch function at a time.

The product of two activations is a candidate for scores. What happens to it is followed: a number that multiplies it is
the scale, a tensor that is added is the mask, the product of its softmax with a third tensor is the output. Anything
else on the way makes that last product an error, so that no attention is misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.errors import UnsupportedAttentionError

#: An additive mask forbids a pair by a term that is at most this; models write -10000, -65504 or the least number.
FORBIDDING = -1e4

_PRODUCTS = {"matmul", "bmm"}
_PASSING = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "dropout"}


@dataclass(frozen=True)
class WatchedScores:
    """What is known about a tensor of scores, or of their softmax.

    Attributes:
        query, key: the factors of the product, (…, n, k).
        mask: bool (True = may attend) or additive, or None.
        normalised: whether softmax has been taken.
        unknown: a function that was applied and has no place in dot-product attention.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    normalised: bool = False
    unknown: str | None = None

    def allow(self, allowed: Tensor) -> WatchedScores:
        """With pairs forbidden where `allowed` is False."""
        if self.mask is None:
            return replace(self, mask=allowed)
        if self.mask.dtype == torch.bool:
            return replace(self, mask=self.mask & allowed)
        return replace(self, mask=torch.where(allowed, self.mask, -torch.inf))

    def shift(self, term: Tensor) -> WatchedScores:
        """With a term added to the scores."""
        if self.mask is None:
            return replace(self, mask=term)
        if self.mask.dtype == torch.bool:
            return replace(self, mask=torch.where(self.mask, term, -torch.inf))
        return replace(self, mask=self.mask + term)

    def stretch(self, factor: float) -> WatchedScores:
        """With the scores multiplied by a number."""
        mask = self.mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask * factor
        return replace(self, scale=self.scale * factor, mask=mask)


@dataclass(frozen=True)
class WatchedOutput:
    """Attention that was recognised: the scores' story, the values and the output."""

    scores: WatchedScores
    value: Tensor


class EagerRecogniser:
    """Follows scores through the functions of one forward pass."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def see(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, module: str
    ) -> WatchedOutput | None:
        """Takes note of one call; returns the attention that it completes, if it does.

        Args:
            function: the torch function.
            args: what it was called with.
            kwargs: likewise.
            result: what it returned.
            module: qualified name of the module, for errors.
        """
        name = getattr(function, "__name__", "").strip("_")
        tracked = next((t for t in _tensors(args, kwargs) if t in self._known), None) if len(self._known) else None
        before: WatchedScores | None = None if tracked is None else self._known[tracked]
        if before is None or (name in _PRODUCTS and not before.normalised):
            scores = _product(name, args, kwargs)
            if scores is not None:
                self._known[result] = scores
            return None
        assert tracked is not None
        if name in _PRODUCTS and args[0] is tracked:
            if before.unknown is not None:
                kind = "a soft cap (tanh)" if before.unknown == "tanh" else repr(before.unknown)
                raise UnsupportedAttentionError(
                    f"module {module!r} applies {kind} to its attention scores or probabilities; expected "
                    "softmax(scale · QKᵀ + mask) V and nothing else"
                )
            return WatchedOutput(before, args[1])
        # What no longer has a row for each query is not attention.
        if isinstance(result, Tensor) and result.shape[:-1] == tracked.shape[:-1] and name != "linear":
            self._known[result] = _step(name, args, kwargs, tracked, before)
        return None


def _product(plain: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> WatchedScores | None:
    """Scores, where the call multiplies two batches of matrices."""
    if plain in _PRODUCTS and len(args) == 2:
        left, right, added = *args, None
    elif plain == "baddbmm" and len(args) == 3 and not kwargs:
        added, left, right = args
    elif plain == "einsum":
        operands = [t for t in _tensors(args, {}) if t.ndim > 2]
        return WatchedScores(operands[0], operands[1], unknown="einsum") if len(operands) == 2 else None
    else:
        return None
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or min(left.ndim, right.ndim) < 3:
        return None
    return WatchedScores(left, right.mT, added, unknown=None if left.ndim < 5 else f"matmul in {left.ndim} dimensions")


def _step(
    plain: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tracked: Tensor, before: WatchedScores
) -> WatchedScores:
    """What is known after one function of tracked scores."""
    unknown = replace(before, unknown=before.unknown or plain)
    if plain == "softmax":
        last = kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, tracked.ndim - 1)
        return replace(before if last and not before.normalised else unknown, normalised=True)
    if plain == "dropout":
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        active = kwargs.get("training", args[2] if len(args) > 2 else True)
        return replace(before, dropout=float(p)) if active and p else before
    if plain in _PASSING:
        return before
    if before.normalised or len(args) < 2:
        return unknown
    first = args[0] is tracked
    other = args[1] if first else args[0]
    match plain:
        case "mul" | "imul" | "rmul" if (factor := _number(other)) is not None and not kwargs:
            return before.stretch(factor)
        case "div" | "truediv" | "itruediv" if first and (factor := _number(other)) and not kwargs:
            return before.stretch(1 / factor)
        case "add" | "iadd" | "radd" if isinstance(other, Tensor) and other.ndim and not kwargs:
            return before.shift(other)
        case "masked_fill" if first and len(args) == 3 and _forbids(args[2]):
            return before.allow(~args[1])
        case "where" if len(args) == 3 and args[1] is tracked and _forbids(args[2]):
            return before.allow(args[0])
        case "where" if len(args) == 3 and args[2] is tracked and _forbids(args[1]):
            return before.allow(~args[0])
    return unknown


def _number(value: object) -> float | None:
    """A Python number, or a tensor that holds one."""
    if isinstance(value, int | float):
        return float(value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad else None


def _forbids(value: object) -> bool:
    number = _number(value)
    return number is not None and number <= FORBIDDING


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among the arguments, also inside a list of them."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item
