"""The digits ViT that comes with Holdfast."""

from holdfast.network.conversion.design import Block, Classifier, Embedding, Encoder, First, register_design

_BLOCK = Block(
    attention="attention", norms=("attention_norm", "mlp_norm"), mlp=("mlp.0", "mlp.1", "mlp.2"), norm_first=True
)
_ENCODER = Encoder(
    Embedding(map="embedding", patch=2, tokens=("class_token",), positions="positions"), "blocks", _BLOCK, "norm"
)

register_design("holdfast", ("DigitsViT",), Classifier(_ENCODER, (First(),), "head"))
