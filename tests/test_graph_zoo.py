"""Every kind of model is converted from its graph, certified, and attacked by its own forward inside the radius."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_cases import check, pictures, stirred, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Build = Callable[[], nn.Module]

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "num_labels": 3}
WORDS = SIZES | {"vocab_size": 30, "max_position_embeddings": 16}
PIXELS = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 1}
DECODER = WORDS | {"pad_token_id": 0}
IDS = torch.tensor([[5, 9, 12, 7], [6, 11, 20, 22]])
PADDED = {"input_ids": torch.tensor([[5, 9, 12, 0, 0]] * 2), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 2)}
PLAIN = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}

slow = pytest.mark.slow

HUGGING_FACE = [
    ("ViT", "ViTForImageClassification", "ViTConfig", PIXELS, pictures()),
    pytest.param("DeiT", "DeiTForImageClassification", "DeiTConfig", PIXELS, pictures(), marks=slow),
    ("BERT", "BertForSequenceClassification", "BertConfig", WORDS | {"hidden_act": "gelu_new"}, PADDED),
    ("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", WORDS | {"pad_token_id": 0}, PADDED),
    ("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig",
     {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12, "vocab_size": 30, "num_labels": 3}, PADDED),
    ("ALBERT", "AlbertForSequenceClassification", "AlbertConfig",
     WORDS | {"embedding_size": 6, "num_hidden_layers": 2}, PADDED),
    ("GPT-2", "GPT2LMHeadModel", "GPT2Config",
     {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 12, "n_positions": 16}, IDS),
    pytest.param("GPT-2 classifier", "GPT2ForSequenceClassification", "GPT2Config",
     {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16, "num_labels": 3, "pad_token_id": 0},
     PADDED, marks=slow),
    ("Llama", "LlamaForCausalLM", "LlamaConfig",
     DECODER | {"num_key_value_heads": 1, "tie_word_embeddings": True}, PADDED),
    pytest.param("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", DECODER | {"num_key_value_heads": 2}, PLAIN, marks=slow),
    pytest.param("Mistral", "MistralForSequenceClassification", "MistralConfig",
     DECODER | {"num_key_value_heads": 1}, PADDED, marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "config", "sizes", "example"), HUGGING_FACE)
def test_models_of_transformers(
    transformers: ModuleType, name: str, model: str, config: str, sizes: dict[str, Any], example: Any
) -> None:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    check(stirred(getattr(transformers, model)(made)), example)
