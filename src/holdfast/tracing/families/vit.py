"""ViT and DeiT of transformers."""

from holdfast.tracing.family import Family, register_family

register_family(
    Family("vit", "transformers", ("ViTAttention", "DeiTAttention"), maps=("q_proj", "k_proj", "v_proj"), out="o_proj"),
)
