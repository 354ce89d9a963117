"""Holdfast: if the input of a transformer moves by at most eps, how far can its output move, and can you prove it?"""

from holdfast.analysis import Analysis, analyze
from holdfast.api import attack, bound, lipschitz_attack, lipschitz_bound, local_lipschitz
from holdfast.attention import AttentionLayer, HeadNorm, Rotary
from holdfast.attention.diagnostics import AttentionReport, attention_report
from holdfast.attention.softmax import g_k, softmax_jacobian_norm
from holdfast.bounds import Bound, list_bounds, register_bound, register_lipschitz_bound
from holdfast.cache import CacheError, Quantiser, cache_bits, cache_error
from holdfast.certification import certify
from holdfast.errors import (
    HoldfastError,
    InputError,
    MemoryLimitError,
    NotApplicableError,
    SoundnessError,
    UnknownNameError,
    UnsupportedAttentionError,
)
from holdfast.graph import to_network
from holdfast.graph.trace import TracedLayer, iter_trace, trace
from holdfast.results import (
    AttackResult,
    BoundResult,
    Certificate,
    CertificationRun,
    LipschitzResult,
    LipschitzWitness,
    NormResult,
)
from holdfast.train import JaSMin, jasmin

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "AttackResult",
    "AttentionLayer",
    "AttentionReport",
    "Bound",
    "BoundResult",
    "CacheError",
    "Certificate",
    "CertificationRun",
    "HeadNorm",
    "HoldfastError",
    "InputError",
    "JaSMin",
    "LipschitzResult",
    "LipschitzWitness",
    "MemoryLimitError",
    "NormResult",
    "NotApplicableError",
    "Quantiser",
    "Rotary",
    "SoundnessError",
    "TracedLayer",
    "UnknownNameError",
    "UnsupportedAttentionError",
    "analyze",
    "attack",
    "attention_report",
    "bound",
    "cache_bits",
    "cache_error",
    "certify",
    "g_k",
    "iter_trace",
    "jasmin",
    "lipschitz_attack",
    "lipschitz_bound",
    "list_bounds",
    "local_lipschitz",
    "register_bound",
    "register_lipschitz_bound",
    "softmax_jacobian_norm",
    "to_network",
    "trace",
]
