"""VisionTransformer of timm: a class token or a mean, registers, LayerScale, a norm before or after pooling."""

from typing import Any

from torch import nn

from holdfast.network.conversion.design import (
    Block,
    Classifier,
    Embedding,
    Encoder,
    First,
    Mean,
    Norm,
    Step,
    register_design,
)
from holdfast.network.conversion.parts import refuse

_EMBEDDING = Embedding(
    map="patch_embed.proj", tokens=("cls_token", "reg_token"), positions="pos_embed", norm="norm_pre"
)
_BLOCK = Block(
    attention="attn",
    norms=("norm1", "norm2"),
    mlp=("mlp.fc1", "mlp.act", "mlp.fc2"),
    norm_first=True,
    scales=("ls1", "ls2"),
)
_ENCODER = Encoder(_EMBEDDING, "blocks", _BLOCK, "norm")


def _classifier(model: nn.Module) -> Classifier:
    found: Any = model
    skipped = 0 if found.pool_include_prefix else found.num_prefix_tokens
    poolings: dict[str, Step] = {"token": First(), "avg": Mean(skipped)}
    pooling = poolings.get(found.global_pool)
    if pooling is None:
        raise refuse("", model, f"pools by global_pool={found.global_pool!r}; expected 'token' or 'avg'")
    return Classifier(_ENCODER, (pooling, Norm("fc_norm")), "head")


register_design("timm", ("VisionTransformer",), _classifier)
