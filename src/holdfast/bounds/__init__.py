"""Upper bounds: one file for each family of theorems, one registration line for each method."""

# Methods are listed in the order in which they are registered here.
# isort: off
from holdfast.bounds.base import Bound, bounds, list_bounds, register_bound
from holdfast.bounds.lofast import Lofast, LofastXi, Naive
from holdfast.bounds.covariance import Covariance, Plus
from holdfast.bounds.second_order import Mixed, SecondOrder
from holdfast.bounds.best import Best
# isort: on

__all__ = [
    "Best",
    "Bound",
    "Covariance",
    "Lofast",
    "LofastXi",
    "Mixed",
    "Naive",
    "Plus",
    "SecondOrder",
    "bounds",
    "list_bounds",
    "register_bound",
]
