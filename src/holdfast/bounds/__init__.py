"""Upper bounds: one file for each family of theorems, one registration line for each method."""

from holdfast.bounds.base import Bound, bounds, list_bounds, register_bound
from holdfast.bounds.best import Best
from holdfast.bounds.lofast import Lofast, LofastXi, Naive

__all__ = ["Best", "Bound", "Lofast", "LofastXi", "Naive", "bounds", "list_bounds", "register_bound"]
