"""Functions that follow from a normalisation: where covectors of their own would cost too much.

Queries, keys, values, logits and pre-activations are linear in what a normalisation gives out. Its output moves by
scale ⊙ (w - n a) + e, w and a being its own functions, which have covectors; so their first-order rows and rests give
those of every function behind it (docs/math/forms.md, section 11).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import THETA, UNDERFLOW, Local, Rests
from holdfast.compositions.forms.normalised import Normalised
from holdfast.linalg.rounding import up

_CHUNK = 2**20  # numbers of rows that are made at once


@final
class Derived:
    """The functions of a place behind a normalisation.

    Args:
        local: the place.
        norm: the normalisation whose output it takes, placed.
        tokens: those of the place's output that matter.
        defect: of the normalisation's value, what it was rounded by.
    """

    def __init__(self, local: Local, norm: Normalised, tokens: Tensor, defect: float) -> None:
        self._local, self._norm = local, norm
        named, self._error = local.covectors(tokens)
        self._count = named.count
        Y, unsure = norm.output_rows()  # (n, d, p), (n, d)
        some = ~torch.isnan(unsure)
        lengths = local.most(some.double())  # at least, of the covectors; others are seen to have no number
        size = float(torch.linalg.vector_norm(Y[some]))
        rounding = local.most(unsure) + (4 * self._error + 8 * THETA * lengths) * size
        self._rounding, self._still = up(rounding, 1e-9), lengths * defect

    @property
    def X(self) -> Tensor:
        """(K, p) their first-order rows, made anew: the place keeps them in an order of its own."""
        Y, _ = self._norm.output_rows()
        n, d, p = Y.shape
        rows = torch.empty(self._count, p, dtype=torch.float64)
        for some in torch.split(torch.arange(p), max(1, _CHUNK // (n * d))):
            rows[:, some] = self._local.functions(Y[..., some].movedim(-1, 0))
        return rows

    def rests(self, radius: float, moved: float, beyond: Tensor | None = None) -> Rests:
        """What the functions have beyond first order, at the scale that the normalisation knows.

        But for rounding it is `beyond` (K), where that is given.
        """
        tiny = up(self._rounding * radius + self._error * moved + self._still, 1e-12) + UNDERFLOW
        most = up((self._local.most(self._norm.output_beyond()) if beyond is None else beyond) + tiny, 1e-12)
        return Rests(most, most, tiny)
