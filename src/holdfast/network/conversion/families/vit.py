"""ViT and DeiT of transformers."""

from holdfast.network.conversion.design import Block, Classifier, Embedding, Encoder, First, register_design

_EMBEDDING = Embedding(
    map="embeddings.patch_embeddings.projection",
    tokens=("embeddings.cls_token", "embeddings.distillation_token"),
    positions="embeddings.position_embeddings",
)
_BLOCK = Block(
    attention="attention",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("mlp.fc1", "mlp.activation_fn", "mlp.fc2"),
    norm_first=True,
)

register_design("transformers", ("ViTModel", "DeiTModel"), Encoder(_EMBEDDING, "layers", _BLOCK, "layernorm"))
register_design("transformers", ("ViTForImageClassification",), Classifier("vit", (First(),), "classifier"))
register_design("transformers", ("DeiTForImageClassification",), Classifier("deit", (First(),), "classifier"))
