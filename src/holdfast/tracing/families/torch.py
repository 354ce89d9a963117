"""torch's own multi-head attention, which nn.TransformerEncoder uses too."""

from holdfast.tracing.family import Family, register_family

register_family(Family("torch", "torch", ("MultiheadAttention",), maps=(), out="out_proj", prescaled=True))
