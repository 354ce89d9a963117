"""One layer of softmax dot-product attention, its probabilities and its Jacobian in closed form."""

from holdfast.attention.head_norm import HeadNorm
from holdfast.attention.jacobian import AttentionJacobian, ScoreOperator, ValueOperator, fold, score_operator
from holdfast.attention.large_radius import large_radius_limit
from holdfast.attention.layer import AttentionLayer
from holdfast.attention.measure import WeightedJacobian, on_measure
from holdfast.attention.rotary import Rotary

__all__ = [
    "AttentionJacobian",
    "AttentionLayer",
    "HeadNorm",
    "Rotary",
    "ScoreOperator",
    "ValueOperator",
    "WeightedJacobian",
    "fold",
    "large_radius_limit",
    "on_measure",
    "score_operator",
]
