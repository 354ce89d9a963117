"""One layer of softmax dot-product attention, its probabilities and its Jacobian in closed form."""

from holdfast.attention.jacobian import AttentionJacobian, ScoreOperator, ValueOperator, fold, score_operator
from holdfast.attention.layer import AttentionLayer

__all__ = ["AttentionJacobian", "AttentionLayer", "ScoreOperator", "ValueOperator", "fold", "score_operator"]
