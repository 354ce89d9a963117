"""The attention layers of unmodified models: seen while the model runs, rebuilt, and checked against it."""

from holdfast.tracing import families
from holdfast.tracing.family import Family, register_family
from holdfast.tracing.tap import AttentionCall, Tap
from holdfast.tracing.trace import TracedLayer, iter_trace, trace

__all__ = ["AttentionCall", "Family", "Tap", "TracedLayer", "families", "iter_trace", "register_family", "trace"]
