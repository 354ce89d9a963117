"""Functions that follow from a normalisation: where covectors of their own would cost too much.

Queries, keys, values, logits and pre-activations are linear in what a normalisation gives out. Its output moves by
scale ⊙ (w - n a) + e, w and a being its own functions, which have covectors; so their first-order rows and rests give
those of every function behind it (docs/math/forms.md, section 11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import THETA, Local, Rests
from holdfast.compositions.forms.normalised import Normalised
from holdfast.linalg.rounding import frobenius_upper


@final
@dataclass(frozen=True)
class _Some:
    """Functions (K) that depend on some tokens, by the absolute values of their covectors there, (K, i d)."""

    tokens: Tensor
    size: Tensor


@final
class Derived:
    """The functions of a place behind a normalisation.

    Args:
        local: the place.
        norm: the normalisation whose output it takes, placed.
        tokens: those of the place's output that matter.
        together: how many functions are treated at once.
        defect: of the normalisation's value, what it was rounded by.

    Attributes:
        X: (K, p) their first-order rows.
    """

    def __init__(self, local: Local, norm: Normalised, tokens: Tensor, together: int, defect: float) -> None:
        C, error = local.covectors(tokens)
        Y, unsure = norm.output_rows()  # (n, d, p), (n, d)
        self._norm, self._parts, rows, rounding = norm, list[_Some](), [], []
        for some in torch.split(C, together):
            seen = (some != 0).any(-1).any(0).nonzero().squeeze(-1)
            c = some[:, seen].flatten(1)
            rows.append(c @ Y[seen].flatten(0, 1))
            size = torch.linalg.vector_norm(Y[seen].flatten(0, 1), dim=-1)
            rounding.append(c.abs() @ (unsure[seen].flatten() + 2 * THETA * size))
            self._parts.append(_Some(seen, c.abs()))
        self.X = torch.cat(rows)
        self._rounding = torch.cat(rounding) * (1 + 1e-9)
        self._error, self._still = error, frobenius_upper(C) * defect

    def rests(self, radius: float, moved: float) -> Rests:
        """What the functions have beyond first order, at the scale that the normalisation knows."""
        y = self._norm.output_beyond()  # (n, d)
        tiny = (self._rounding * radius + self._error * moved + self._still) * (1 + 1e-12)
        most = torch.cat([part.size @ y[part.tokens].flatten() for part in self._parts])
        most = (most * (1 + 1e-9) + tiny) * (1 + 1e-12)
        return Rests(most, most, tiny)
