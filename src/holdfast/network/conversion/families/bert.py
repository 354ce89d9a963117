"""BERT and RoBERTa."""

from holdfast.network.conversion.design import Block, Classifier, Dense, Embedding, Encoder, First, register_design

_EMBEDDING = Embedding(
    map="embeddings.word_embeddings",
    added=("embeddings.position_embeddings", "embeddings.token_type_embeddings"),
    norm="embeddings.LayerNorm",
)
_BLOCK = Block(
    attention="attention.self",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    mlp=("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    norm_first=False,
)

register_design("transformers", ("BertModel", "RobertaModel"), Encoder(_EMBEDDING, "encoder.layer", _BLOCK))
register_design(
    "transformers",
    ("BertForSequenceClassification",),
    Classifier("bert", (First(), Dense("bert.pooler.dense", "bert.pooler.activation")), "classifier"),
)
register_design(
    "transformers",
    ("RobertaForSequenceClassification",),
    Classifier("roberta", (First(), Dense("classifier.dense", "tanh")), "classifier.out_proj"),
)
