"""ALBERT, whose layers share one module."""

from holdfast.tracing.family import Family, register_family

register_family(
    Family("albert", "transformers", ("AlbertAttention",), maps=("query", "key", "value"), out="dense"),
)
