"""Upper bounds: one file for each family of theorems, one registration line for each method."""

# Methods are listed in the order in which they are registered here.
# isort: off
from holdfast.bounds.base import Bound, LayerMethod, bounds, register_bound
from holdfast.bounds.lipschitz import (
    BallBound,
    LipschitzBound,
    PointBound,
    ball_bounds,
    point_bounds,
    register_lipschitz_bound,
)
from holdfast.bounds.lofast import Lofast, LofastXi, Naive
from holdfast.bounds.covariance import Covariance, Plus
from holdfast.bounds.second_order import Mixed, SecondOrder
from holdfast.bounds.rows import RowsBound
from holdfast.bounds.pairs import Pairs
from holdfast.bounds.taylor import Taylor
from holdfast.bounds.jacobian import Jacobian
from holdfast.bounds.castin import CastinBall, CastinData, CastinMasked, CastinSharp
from holdfast.bounds.mean_field import MeanField, MeanFieldMasked
from holdfast.bounds.yudin import Yudin, YudinB2, YudinB3, YudinBall
from holdfast.bounds.token_radius import layer_norm_radius, rms_norm_radius
from holdfast.bounds.best import Best, BestAtPoint, BestOnBall
from holdfast.errors import InputError
# isort: on


def bound_named(name: str) -> Bound:
    """The bound over a ball at x with this name; a bound of a slope is refused by saying what it is."""
    if name not in bounds and (name in point_bounds or name in ball_bounds):
        where = "at one point" if name in point_bounds else "on a ball around 0"
        raise InputError(
            f"{name!r} bounds the slope {where}, which proves nothing about a ball around x; "
            f"call lipschitz_bound for it, or bound with one of {', '.join(bounds)}"
        )
    return bounds[name]


def list_bounds() -> list[LayerMethod]:
    """Every registered bound; each has .name .side .scope .guarantees .cost .reference .assumptions."""
    return [*bounds.values(), *point_bounds.values(), *ball_bounds.values()]


__all__ = [
    "BallBound",
    "Best",
    "BestAtPoint",
    "BestOnBall",
    "Bound",
    "CastinBall",
    "CastinData",
    "CastinMasked",
    "CastinSharp",
    "Covariance",
    "Jacobian",
    "LayerMethod",
    "LipschitzBound",
    "Lofast",
    "LofastXi",
    "MeanField",
    "MeanFieldMasked",
    "Mixed",
    "Naive",
    "Pairs",
    "Plus",
    "PointBound",
    "RowsBound",
    "SecondOrder",
    "Taylor",
    "Yudin",
    "YudinB2",
    "YudinB3",
    "YudinBall",
    "ball_bounds",
    "bound_named",
    "bounds",
    "layer_norm_radius",
    "list_bounds",
    "point_bounds",
    "register_bound",
    "register_lipschitz_bound",
    "rms_norm_radius",
]
