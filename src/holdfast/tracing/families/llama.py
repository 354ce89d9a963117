"""Llama and those built like it: rotary positions, grouped heads, sliding windows.

Qwen3 and Gemma 2 stand here so that what they add (query-key norm, soft cap) is found and named.
"""

from holdfast.tracing.family import Family, register_family

_MODULES = (
    *("LlamaAttention", "MistralAttention", "MixtralAttention", "Qwen2Attention", "Qwen2MoeAttention"),
    *("GemmaAttention", "Gemma2Attention", "Qwen3Attention"),
)

register_family(
    Family(
        "llama",
        "transformers",
        _MODULES,
        maps=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        rotary="half",
    )
)
