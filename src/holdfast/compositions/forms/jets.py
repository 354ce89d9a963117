"""The second order of every function of a place, as one form: that of all earlier places together.

With q_l[b, b] the second order of place l at its own first-order functions, a place's input moves by J b + T[b, b] and
what is of third order, where T follows T ↦ A_l T + q_l along the network. A function c of the place then has the form
c·T, in which the second orders of all places meet before anything is bounded (docs/math/forms.md, section 6a).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.local import Local
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.walk import CentreWalk, Covectors
from holdfast.layers.piece import LinearPiece
from holdfast.linalg import Ball
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma
from holdfast.linalg.squarings import gram_norm

_NUMBERS = 2**25  # of T at one place, at most
_PRODUCTS = 2e11  # for the norms of all functions' forms, at most
_CHUNK = 2**22
_SQUARINGS = 2


@final
class SecondOrders:
    """T at the places of a network, one after the other: an iterator that a place is asked of before it goes on.

    T is symmetric, and kept for pairs of directions (pairs, n, d).

    Attributes:
        sizes: bounds of ‖T[b, b]‖ at the inputs of all places, for ‖b‖ <= 1.
        defects: bounds of what rounding did to it in each place.
    """

    def __init__(self, walk: CentreWalk, region: Region) -> None:
        self._walk, self._directions = walk, Directions(region.p, torch.device("cpu"))
        self.sizes, self.defects = torch.zeros(2, len(walk.places), dtype=torch.float64)
        self._steps = self._walked()

    @staticmethod
    def affordable(walk: CentreWalk, region: Region) -> bool:
        """Whether T fits into memory, and the norms of all functions into a minute."""
        widest = max((place.u.numel() for place in walk.places), default=0)
        functions = sum(walk.local(i).scalars for i in walk.curved)
        fits = region.p * (region.p + 1) // 2 * widest <= _NUMBERS
        return fits and functions * 2.0 * (_SQUARINGS + 1) * region.p**3 <= _PRODUCTS

    def norms(self, i: int, covectors: Float64[Tensor, "K n d"]) -> Float64[Tensor, " K"]:
        """Bounds of |c·T[b, b]| for ‖b‖ <= 1, for functions c of the next place i that is not affine."""
        place, T = next(self._steps)
        assert place == i
        if T is None:
            return torch.zeros(len(covectors), dtype=torch.float64)
        flat, p = T.flatten(1), self._directions.p
        accuracy = gamma(flat.shape[1] + 2) * self._length(T)
        parts = []
        for some in torch.split(covectors.flatten(1), max(1, _CHUNK // p**2)):
            forms = (some @ flat.mT)[:, self._directions.place]
            error = torch.linalg.vector_norm(some, dim=-1) * accuracy * (1 + 1e-9)
            parts.append(gram_norm(forms, error, _SQUARINGS).square() * (1 + 1e-9))
        return torch.cat(parts)

    def tiny(self, functions: Covectors, radius: float) -> Tensor:
        """(K) bounds of what rounding may have done to the functions' forms, on the ball of this radius."""
        lost = functions.lengths @ self.defects + functions.moving @ self.sizes
        return lost * (radius * radius * (1 + 1e-9))

    def _walked(self) -> Iterator[tuple[int, Tensor | None]]:
        """Every place that is not affine, with T at its input; None stands for zero."""
        T: Tensor | None = None
        for members, skip, _ in self._walk.stages:
            stream = T
            for i in members:
                place = self._walk.places[i]
                self.sizes[i] = 0.0 if T is None else self._length(T)
                if place.local is not None:
                    yield i, T
                    T = self._through(i, place.local, T)
                elif T is not None:
                    assert isinstance(place.piece, LinearPiece)
                    out = place.piece.push(Ball.exact(place.u), Ball.exact(T))
                    T, self.defects[i] = out.mid, self._length(out.rad)
            if skip and stream is not None:
                assert T is not None
                T = stream + T
                self.defects[members[-1]] += 2 * UNIT * self._length(T)

    def _through(self, i: int, local: Local, T: Tensor | None) -> Tensor:
        new, defect = local.second_order(self._directions)
        self.defects[i] = defect
        if T is None:
            return new
        lost = []
        for part in torch.split(torch.arange(len(T)), max(1, _CHUNK // (8 * new[0].numel()))):
            pushed, error = local.push(T[part])
            new[part] += pushed
            lost.append(error)
        weight = self._directions.count.sqrt()
        self.defects[i] += torch.linalg.vector_norm(torch.cat(lost) * weight) * (1 + 1e-9)
        self.defects[i] += 2 * UNIT * self._length(new)
        return new

    def _length(self, T: Tensor) -> Tensor:
        """A bound of the Frobenius norm of T for ordered pairs, and so of ‖T[b, b]‖ for ‖b‖ <= 1."""
        lengths = frobenius_upper(T) * self._directions.count.sqrt()
        return torch.linalg.vector_norm(lengths) * (1 + 1e-9)
