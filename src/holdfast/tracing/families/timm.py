"""ViT and DeiT of timm."""

from holdfast.tracing.family import Family, register_family

register_family(Family("timm", "timm", ("Attention",), maps=("qkv",), out="proj", prescaled=True))
