"""The conformance kit: a new operator, bound, attack or piece inherits the tests that all of its kind must pass.

    from holdfast.testing import BoundConformance

    class TestMyBound(BoundConformance):
        def name(self) -> str:
            return "my-bound"

Each class writes at most two methods. The tests run under pytest, once for every layer of `cases`.
"""

from holdfast.testing.attacks import AttackConformance
from holdfast.testing.bounds import BoundConformance
from holdfast.testing.compositions import CompositionConformance
from holdfast.testing.every import for_every
from holdfast.testing.layers import Case, cases, changed, gaussian_case, make_case, random_case
from holdfast.testing.lipschitz import BallBoundConformance, PointBoundConformance
from holdfast.testing.networks import NetworkCase, network_cases
from holdfast.testing.operators import OperatorConformance, ProvableConformance
from holdfast.testing.pieces import PieceCase, PieceConformance

__all__ = [
    "AttackConformance",
    "BallBoundConformance",
    "BoundConformance",
    "Case",
    "CompositionConformance",
    "NetworkCase",
    "OperatorConformance",
    "PieceCase",
    "PieceConformance",
    "PointBoundConformance",
    "ProvableConformance",
    "cases",
    "changed",
    "for_every",
    "gaussian_case",
    "make_case",
    "network_cases",
    "random_case",
]
