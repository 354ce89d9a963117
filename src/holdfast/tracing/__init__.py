"""The attention of a running model, seen while it trains, and models of others loaded by name."""

from holdfast.tracing.tap import AttentionCall, Tap

__all__ = ["AttentionCall", "Tap"]
