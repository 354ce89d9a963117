"""DistilBERT."""

from holdfast.network.conversion.design import Block, Classifier, Dense, Embedding, Encoder, First, register_design

_EMBEDDING = Embedding(
    map="embeddings.word_embeddings", added=("embeddings.position_embeddings",), norm="embeddings.LayerNorm"
)
_BLOCK = Block(
    attention="attention",
    norms=("sa_layer_norm", "output_layer_norm"),
    mlp=("ffn.lin1", "ffn.activation", "ffn.lin2"),
    norm_first=False,
)

register_design("transformers", ("DistilBertModel",), Encoder(_EMBEDDING, "transformer.layer", _BLOCK))
register_design(
    "transformers",
    ("DistilBertForSequenceClassification",),
    Classifier("distilbert", (First(), Dense("pre_classifier", "relu")), "classifier"),
)
