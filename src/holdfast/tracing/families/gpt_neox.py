"""GPT-NeoX and Pythia: one map, head by head, and rotary positions on a part of each head."""

from holdfast.tracing.family import Family, register_family

register_family(
    Family(
        "gpt-neox",
        "transformers",
        ("GPTNeoXAttention",),
        maps=("query_key_value",),
        layout="heads",
        out="dense",
        rotary="half",
    )
)
