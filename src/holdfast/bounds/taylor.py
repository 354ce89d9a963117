"""The Jacobian at x and a coarse bound of the curvature, for whatever is done to scores (docs/math/scores.md)."""

from __future__ import annotations

import math
from typing import ClassVar, final

from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, ValueOperator, fold
from holdfast.attention.jacobian import Folded
from holdfast.bounds.base import EVERY_TERM, Bound, Evaluation, register_bound
from holdfast.bounds.placed import placed_gains
from holdfast.bounds.score_map import distances2, root, score_map
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import ROOT2, up

_CAP_BEND = up(4 / (3 * math.sqrt(3.0)), 2**-50)  # max |d²/ds² tanh s|, not below the exact value


@final
@register_bound
class Taylor(Bound):
    """δ = ε ‖J(X)‖ + ½ ε² Σ_l (½ (‖ΠV_l‖ + ε‖C_l‖) s''_l + ½ D_l s'_l² + ‖C_l‖ s'_l), or what is left of all values.

    s'_l and s''_l bound the derivatives of all scores of a head on the ball, with norms of queries and keys and a soft
    cap; D_l is the diameter of its values there. Its ratio to the truth tends to 1 as ε tends to 0, also for the
    layers that `second-order` has no proof for.
    """

    name = "taylor"
    score_terms = EVERY_TERM
    stands_in = True
    in_networks, in_networks_with = ("smallest",), "cap"  # where no other one bounds the curvature
    cost = "two norms of size nd x nd; norms of n x d matrices"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        f = fold(layer, a.lift(x))
        gain = a.once("jacobian", lambda: a.norm(AttentionJacobian(layer, x)))
        curvature, terms = curvature_on_balls(a, layer, x, eps)
        C = a.matrix_norm(f.c).unsqueeze(-1)
        curved = gain.unsqueeze(-1) * eps + curvature * (eps * eps) * 0.5
        zeta = a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))
        reach = self._farthest(f.p, _values(a, layer, f), C, eps.unsqueeze(-2), sinks=layer.sinks is not None)
        saturated = zeta.unsqueeze(-1) * eps + reach
        terms = {"jacobian": gain, "curvature": curvature} | terms | {"zeta": zeta, "saturated": saturated}
        return Evaluation(a.least(curved, saturated), terms)

    def _farthest(self, p: Array, values: Array, C: Array, eps: Array, *, sinks: bool) -> Array:
        """(b…, e) how far the rows can go, whatever the probabilities become: no farther than to one of the values."""
        means = p @ values
        reach = root(distances2(means, values).amax(-1))  # (b…, h, n), from the mean to the farthest value
        if sinks:
            reach = _larger(reach, root(means.square().sum(-1)))
        reach = reach.unsqueeze(-1) + (C * eps * ROOT2).unsqueeze(-2)
        return root(reach.sum(-3).square().sum(-2))


def curvature_on_balls(
    a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array
) -> tuple[Array, dict[str, Array]]:
    """(b…, e) the theorem's β: a bound of ‖D²F[G, G]‖_F on the ball of radius eps for ‖G‖_F = 1, and its terms."""
    X = a.lift(x)
    f, radii = fold(layer, X), eps.unsqueeze(-2)  # for every head
    first, second = _scores(a, layer, X, radii)
    if layer.soft_cap is not None:
        second = second + first.square() * up(_CAP_BEND / layer.soft_cap, 2**-50)
    C = a.matrix_norm(f.c).unsqueeze(-1)
    values = _values(a, layer, f)
    size = a.matrix_norm(values).unsqueeze(-1) + C * radii
    diameter = root(distances2(values, values).amax((-2, -1))).unsqueeze(-1) + C * radii * ROOT2
    if layer.sinks is not None:  # a sink has the value 0
        diameter = _larger(diameter, root(values.square().sum(-1).amax(-1)).unsqueeze(-1) + C * radii)
    curvature = ((size * second + diameter * first.square()) * 0.5 + C * first).sum(-2)
    return curvature, {"scores": first, "curved_scores": second}


def _values(a: Arithmetic[Array], layer: AttentionLayer, f: Folded[Array]) -> Array:
    """Values minus a common row, which counts where there are sinks."""
    return f.v if layer.sinks is not None else f.v - a.number(f.v).mean(-2, keepdim=True)


def _scores(a: Arithmetic[Array], layer: AttentionLayer, X: Array, eps: Array) -> tuple[Array, Array]:
    """(b…, h, e) bounds of ‖s'‖_F and ‖s''‖_F on the ball, before a soft cap."""
    f = fold(layer, X)
    if layer.q_norm is None and layer.k_norm is None:
        maps = score_map(a, layer, f)
        bilinear = a.matrix_norm(maps.forms[0]).unsqueeze(-1) * 2.0
        at_x = (maps.query_norm(centred=False) + maps.key_norm()).unsqueeze(-1)
        return at_x + bilinear * eps, bilinear + eps * 0.0
    query, key = placed_gains(a, layer, X, eps)
    scale = abs(layer.scale)
    Q, K = (a.matrix_norm(rows.left).unsqueeze(-1) for rows in (f.key_rows, f.query_rows))  # with the scale
    Q, K = Q + query.slope * eps * scale, K + key.slope * eps * scale
    first = query.slope * K + Q * key.slope
    return first, query.bend * K + query.slope * key.slope * (2 * scale) + Q * key.bend


def _larger(x: Array, y: Array) -> Array:
    return -(-x).minimum(-y)
