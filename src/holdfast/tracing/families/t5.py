"""T5: no scale, and a relative position bias, which becomes the layer's score bias."""

from holdfast.tracing.family import Family, register_family

register_family(Family("t5", "transformers", ("T5Attention",), maps=("q", "k", "v"), out="o"))
