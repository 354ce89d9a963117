"""LayerNorm and RMSNorm: the pieces and their expansion."""
