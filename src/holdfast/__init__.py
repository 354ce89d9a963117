"""Holdfast: if the input of a transformer moves by at most eps, how far can its output move, and can you prove it?"""

from holdfast.api import attack, bound, local_lipschitz
from holdfast.attention import AttentionLayer
from holdfast.bounds import Bound, list_bounds, register_bound
from holdfast.errors import (
    HoldfastError,
    InputError,
    MemoryLimitError,
    NotApplicableError,
    SoundnessError,
    UnknownNameError,
)
from holdfast.results import AttackResult, BoundResult, NormResult

__version__ = "0.1.0"

__all__ = [
    "AttackResult",
    "AttentionLayer",
    "Bound",
    "BoundResult",
    "HoldfastError",
    "InputError",
    "MemoryLimitError",
    "NormResult",
    "NotApplicableError",
    "SoundnessError",
    "UnknownNameError",
    "attack",
    "bound",
    "list_bounds",
    "local_lipschitz",
    "register_bound",
]
