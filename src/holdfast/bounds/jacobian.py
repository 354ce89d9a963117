"""The norm of the Jacobian itself, for which every other bound at a point is an estimate in closed form."""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.bounds.base import EVERY_TERM, Evaluation
from holdfast.bounds.lipschitz import PointBound, register_lipschitz_bound
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
@register_lipschitz_bound
class Jacobian(PointBound):
    """‖DF(x)‖: proved from the Gram matrix of the closed form, or iterated."""

    name = "jacobian"
    score_terms = EVERY_TERM
    cost = "one norm of size nd x nd"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        norm = a.norm(AttentionJacobian(layer, x))
        return Evaluation(norm, {"jacobian": norm})
