"""BERT and RoBERTa; in earlier releases of transformers also ViT and DeiT. The output map is in a sister module."""

from holdfast.tracing.family import Family, register_family

_MODULES = (
    *("BertSelfAttention", "BertCrossAttention", "RobertaSelfAttention", "RobertaCrossAttention"),
    *("ViTSelfAttention", "DeiTSelfAttention"),
)

register_family(
    Family("bert", "transformers", _MODULES, maps=("query", "key", "value"), out="../output.dense"),
)
