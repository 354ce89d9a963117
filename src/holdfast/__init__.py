"""Holdfast: if the input of a transformer moves by at most eps, how far can its output move, and can you prove it?"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holdfast import reporting
from holdfast.version import __version__

if TYPE_CHECKING:
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
        Target,
    )
    from holdfast.train.jasmin import jasmin
    from holdfast.train.penalty import JaSMin

reporting.register("analysis", "holdfast.report.analysis")
reporting.register("analysis page", "holdfast.report.page")
reporting.register("junit", "holdfast.report.junit")
reporting.register("certificate", "holdfast.report.certificate")

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
    "Target",
    "TracedLayer",
    "UnknownNameError",
    "UnsupportedAttentionError",
    "__version__",
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

#: Where the public names live: each module, and torch with it, is imported when one of its names is first used.
_HOMES = {
    "analysis": "Analysis analyze",
    "api": "attack bound lipschitz_attack lipschitz_bound local_lipschitz",
    "attention": "AttentionLayer HeadNorm Rotary",
    "attention.diagnostics": "AttentionReport attention_report",
    "attention.softmax": "g_k softmax_jacobian_norm",
    "bounds": "Bound list_bounds register_bound register_lipschitz_bound",
    "cache": "CacheError Quantiser cache_bits cache_error",
    "certification": "certify",
    "errors": (
        "HoldfastError InputError MemoryLimitError NotApplicableError "
        "SoundnessError UnknownNameError UnsupportedAttentionError"
    ),
    "graph": "to_network",
    "graph.trace": "TracedLayer iter_trace trace",
    "results": (
        "AttackResult BoundResult Certificate CertificationRun LipschitzResult LipschitzWitness NormResult Target"
    ),
    "train.jasmin": "jasmin",
    "train.penalty": "JaSMin",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
