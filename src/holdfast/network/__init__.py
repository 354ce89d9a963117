"""Networks as chains of pieces, at an input."""

from holdfast.network.network import Head, Network, Residual

__all__ = ["Head", "Network", "Residual"]
