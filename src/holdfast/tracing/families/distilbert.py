"""DistilBERT."""

from holdfast.tracing.family import Family, register_family

_MODULES = ("DistilBertSelfAttention", "MultiHeadSelfAttention")

register_family(
    Family("distilbert", "transformers", _MODULES, maps=("q_lin", "k_lin", "v_lin"), out="out_lin"),
)
