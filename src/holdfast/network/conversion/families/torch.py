"""A model of one's own around an encoder: `nn.TransformerEncoder`, or one of transformers that is known.

It is recognised by its attributes, whatever its class:

    encoder      nn.TransformerEncoder, or BertModel, RobertaModel, DistilBertModel, ViTModel or DeiTModel
    pooling      "first" or "mean": which token goes on
    head         nn.Linear, or an nn.Sequential of nn.Linear, activations and nn.LayerNorm that ends in an nn.Linear

and around nn.TransformerEncoder, each of them optional:

    embedding    nn.Conv2d on images, nn.Embedding on words, nn.Linear on vectors (b, n, c)
    class_token  a parameter (…, d) that stands in front
    positions    a parameter (…, n, d) that is added, also to the class token

The forward pass computes head(pool(encoder(positions + [class_token, embedding(inputs)]))), and pools over the tokens
that the attention mask keeps, where there is one.
"""

from __future__ import annotations

from torch import nn

from holdfast.network.conversion.design import (
    Block,
    Classifier,
    Dense,
    Embedding,
    Encoder,
    First,
    Mean,
    Norm,
    Step,
    describe,
)
from holdfast.network.conversion.parts import refuse

_EMBEDDING = Embedding(map="embedding", tokens=("class_token",), positions="positions")
_BLOCK = Block(
    attention="self_attn",
    norms=("norm1", "norm2"),
    mlp=("linear1", "activation", "linear2"),
    norm_first="norm_first",
)
_ENCODER = Encoder(_EMBEDDING, "encoder.layers", _BLOCK, "encoder.norm")
_POOLINGS: dict[object, Step] = {"first": First(), "mean": Mean()}


def read_wrapper(model: nn.Module) -> Classifier | None:
    """The design of a model that has the attributes above, or None."""
    encoder = getattr(model, "encoder", None)
    if isinstance(encoder, nn.TransformerEncoder):
        found: str | Encoder = _ENCODER
    elif isinstance(encoder, nn.Module) and isinstance(describe(encoder), Encoder):
        found = "encoder"
    else:
        return None
    pooling, head = getattr(model, "pooling", None), getattr(model, "head", None)
    if pooling not in _POOLINGS:
        raise refuse("", model, f"has pooling={pooling!r} beside its encoder; expected the attribute 'first' or 'mean'")
    if not isinstance(head, nn.Linear | nn.Sequential):
        raise refuse("head", head, "is no classification head; expected nn.Linear or an nn.Sequential that ends in one")
    steps, last = _read_head(head)
    return Classifier(found, (_POOLINGS[pooling], *steps), last, unused=("encoder.pooler",))


def _read_head(head: nn.Linear | nn.Sequential) -> tuple[list[Step], str]:
    """The steps of a head, and the path of its last linear map."""
    if isinstance(head, nn.Linear):
        return [], "head"
    steps: list[Step] = []
    parts = [(f"head.{i}", part) for i, part in enumerate(head) if not isinstance(part, nn.Dropout | nn.Identity)]
    while len(parts) > 1:
        (path, part), (after, following) = parts[:2]
        if isinstance(part, nn.LayerNorm):
            steps.append(Norm(path))
            parts = parts[1:]
        elif isinstance(part, nn.Linear) and not isinstance(following, nn.Linear | nn.LayerNorm):
            steps.append(Dense(path, after))
            parts = parts[2:]
        else:
            break
    if len(parts) != 1 or not isinstance(parts[0][1], nn.Linear):
        path, part = parts[0] if parts else ("head", head)
        raise refuse(path, part, "has no place here; expected nn.LayerNorm, nn.Linear and activation, then nn.Linear")
    return steps, parts[0][0]
