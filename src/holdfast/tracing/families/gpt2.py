"""GPT-2."""

from holdfast.tracing.family import Family, register_family

register_family(Family("gpt2", "transformers", ("GPT2Attention",), maps=("c_attn",), out="c_proj"))
