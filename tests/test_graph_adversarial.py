"""Fifty and more models that are not what they look like: refused with the reason, or certified as what they are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import graph_disguises as disguised
from graph_cases import check, pictures, stirred, tokens
from graph_disguises import changed, own, replaced, with_
from holdfast.errors import ConversionError, InputError
from holdfast.graph import to_network
from holdfast.models.transformer import Transformer

Build = Callable[[], nn.Module]


def hook(name: str, change: Callable[[Any], Any]) -> Build:
    return changed(
        lambda model: getattr(model, name).register_forward_hook(lambda module, args, output: change(output)) and None
    )


# -- refused: the words that the message must hold

REFUSED: dict[str, tuple[Build, str]] = {
    "elu after the encoder": (
        with_(pool=lambda self, x: functional.elu(x.mean(1), alpha=3.0)),
        "operator 'elu'.* is not known",
    ),
    "a LayerNorm with its own forward": (
        replaced(norm=lambda: disguised.LayerNorm(8)),
        "module 'norm': operator 'elu'",
    ),
    "a hook with another function": (hook("head", torch.sin), "module 'head': operator 'sin'"),
    "a patched forward": (changed(disguised.own_forward), "cannot be run"),
    "dropout that is always on": (with_(activate=lambda self, u: functional.dropout(u, 0.1, training=True)), "random"),
    "dropout of attention": (
        with_(weigh=lambda self, s: functional.dropout(s.softmax(-1), 0.1, training=True)),
        "random",
    ),
    "noise": (with_(start=disguised.noisy), "random"),
    "rare noise": (with_(start=lambda self, x: x * (torch.rand(1) > 1e-6).to(x.dtype)), "random"),
    "noise of Python": (with_(end=lambda self, y: y * (1 + 1e-3 * random.random())), "not the model"),
    "state of Python": (disguised.Counting, "calls"),
    "a buffer that is written": (disguised.Remembering, "writes to seen"),
    "a branch on values": (with_(start=lambda self, x: x if x.sum() > 0 else -x), "branches on the values"),
    "a branch by item": (with_(start=lambda self, x: x * max(1.0, x.mean().item())), "branches|item|values"),
    "a loop on values": (with_(start=lambda self, x: x[:, : int(x.abs().amax())]), "branches on|values|amax"),
    "numpy": (with_(start=lambda self, x: torch.from_numpy(x.detach().numpy() * 2)), "cannot be read"),
    "relu by where": (with_(activate=lambda self, u: disguised.relu_written(u)), "operator 'gt'.* is not known"),
    "clamp": (with_(activate=lambda self, u: u.clamp(-1, 1)), "limits something that moves"),
    "clamp from above": (with_(activate=lambda self, u: u.clamp(max=1)), "limits something that moves"),
    "clamp from below": (with_(activate=lambda self, u: u.clamp(min=-1)), "limits something that moves"),
    "relu6": (with_(activate=lambda self, u: functional.relu6(u)), "operator '(relu6|hardtanh)'"),
    "round": (with_(activate=lambda self, u: u.round()), "operator 'round'"),
    "a rounding function with a derivative": (with_(activate=lambda self, u: disguised.Rounded.apply(u)), "'round'"),
    "sign": (with_(activate=lambda self, u: u.sign()), "operator 'sign'"),
    "floor division": (with_(activate=lambda self, u: u // 0.5), "floor|rounds"),
    "remainder": (with_(activate=lambda self, u: u % 1.0), "remainder|fmod"),
    "argmax": (with_(end=lambda self, y: y + functional.one_hot(y.argmax(-1), 3)), "operator 'argmax'"),
    "top k": (
        with_(weigh=lambda self, s: s.masked_fill(s < s.topk(2).values[..., -1:], -math.inf).softmax(-1)),
        "attention scores|topk",
    ),
    "sort": (with_(pool=lambda self, x: x.sort(1).values[:, 0]), "operator 'sort'"),
    "maximum over tokens": (with_(pool=lambda self, x: x.amax(1)), "operator 'amax'"),
    "max pooling": (with_(pool=lambda self, x: functional.max_pool1d(x.mT, 4).squeeze(-1)), "max_pool"),
    "a cast to integers": (with_(start=lambda self, x: (x * 8).to(torch.int32) / 8), "turns something.*int32"),
    "a cast by example": (with_(start=lambda self, x: (x * 8).type_as(torch.tensor(1)).type_as(x) / 8), "int64"),
    "a sum in integers": (with_(pool=lambda self, x: x.sum(1, dtype=torch.int64).type_as(x) / 4), "int64"),
    "bfloat16": (with_(start=lambda self, x: x + 1e-6 * x.bfloat16()), "bfloat16"),
    "half": (with_(start=lambda self, x: x.half().to(x.dtype)), "float16"),
    "another function in float32": (
        with_(activate=lambda self, u: u.relu() if u.dtype == torch.float64 else u.tanh()),
        "float32",
    ),
    "another function with gradients": (
        with_(activate=lambda self, u: u.tanh() if torch.is_grad_enabled() else u.relu()),
        "gradients",
    ),
    "softmax over queries": (with_(weigh=lambda self, s: s.softmax(-2)), "softmax is taken over something other"),
    "softmax over heads": (with_(weigh=lambda self, s: s.softmax(1)), "softmax is taken over something other"),
    "probabilities doubled": (with_(weigh=lambda self, s: 2 * s.softmax(-1)), "after softmax"),
    "probabilities renormalised": (
        with_(weigh=lambda self, s: s.exp() / s.exp().sum(-1, keepdim=True)),
        "operator 'exp'",
    ),
    "sigmoid attention": (with_(weigh=lambda self, s: s.sigmoid()), "attention scores"),
    "linear attention": (with_(weigh=lambda self, s: s), "before softmax"),
    "a temperature that depends on the input": (
        with_(score=lambda self, q, k: q @ k.mT * q.mean()),
        "attention scores",
    ),
    "a bias that depends on the input": (
        with_(score=lambda self, q, k: q @ k.mT + q.mean(-1, keepdim=True)),
        "attention scores",
    ),
    "a temperature for each head": (
        with_(score=lambda self, q, k: q @ k.mT * torch.tensor([1.0, 2.0]).reshape(2, 1, 1)),
        "more than one number",
    ),
    "normalised queries": (with_(score=lambda self, q, k: functional.normalize(q, dim=-1) @ k.mT), "norm"),
    "values of other tokens": (with_(value=lambda self, v: v.flip(-2)), "different tokens"),
    "attention to learned keys": (disguised.KeyMemory, "4 queries attend to 6 keys"),
    "a mask for each head": (with_(weigh=disguised.heads_masked), "masks the heads differently"),
    "a row without keys": (with_(weigh=disguised.row_masked), "nan_to_num|attend to no key"),
    "a mask that is undone": (with_(weigh=disguised.unmasked_again), "brings them into reach"),
    "weights that depend on the input": (disguised.Hyper, "attention scores|mixes|softmax"),
    "softmax at the end": (with_(end=lambda self, y: y.softmax(-1)), "should return logits"),
    "log softmax at the end": (with_(end=lambda self, y: y.log_softmax(-1)), "log_softmax"),
    "two outputs": (with_(end=lambda self, y: (y, 2 * y)), "returned tuple; expected a classifier with logits"),
    "a number for each token": (with_(pool=lambda self, x: x), "each of 4 tokens"),
    "batch mixing": (with_(start=lambda self, x: x - x.mean(0)), "another input in the batch|not the model"),
    "BatchNorm of the batch": (
        replaced(second=lambda: nn.BatchNorm1d(4, track_running_stats=False)),
        "normalises by the batch",
    ),
    "RMSNorm without eps": (replaced(norm=lambda: nn.RMSNorm(8)), "has no eps"),
    "a norm of an indefinite form": (
        with_(start=lambda self, x: x * torch.rsqrt(100 - x.pow(2).mean(-1, keepdim=True))),
        "mean squares",
    ),
    "a deviation plus eps": (
        with_(start=lambda self, x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)),
        "mean squares",
    ),
    "a norm of another tensor": (
        with_(start=lambda self, x: x * torch.rsqrt((2 * x + 1).pow(2).mean(-1, keepdim=True) + 1)),
        "something other",
    ),
    "a norm that depends on the input": (
        with_(start=lambda self, x: functional.layer_norm(x, (8,), x[0, 0], None)),
        "depend",
    ),
    "complex numbers": (
        with_(
            start=lambda self, x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 1j).flatten(-2)
        ),
        "complex",
    ),
    "Fourier": (with_(start=lambda self, x: torch.fft.fft(x, dim=1).real), "fft"),
    "a quotient": (with_(activate=lambda self, u: u / (1 + u * u)), "divides by something that moves"),
    "an exponential": (with_(activate=lambda self, u: 1 / (1 + torch.exp(-u))), "exp"),
    "a cube": (with_(activate=lambda self, u: u**3), "no known activation"),
    "softplus": (with_(activate=lambda self, u: functional.softplus(u)), "softplus"),
    "almost GELU": (
        with_(activate=lambda self, u: 0.5 * u * (1 + torch.tanh(0.8 * (u + 0.045 * u**3)))),
        "no known activation: tanh",
    ),
    "reflections at the border": (
        with_(start=lambda self, x: functional.pad(x, (2, 2), mode="reflect")[..., 2:-2].roll(1, -1)),
        "reflection_pad",
    ),
    "batch mixing, alone": (with_(start=lambda self, x: 2 * x - x.mean(0)), "another input in the batch"),
    "the size of the batch, alone": (with_(start=lambda self, x: x * len(x)), "another input in the batch"),
    "another function where gradients are recorded": (
        with_(start=lambda self, x: x * 2 if x.requires_grad else x),
        "with gradients",
    ),
    "an input that is written": (with_(start=lambda self, x: x.mul_(2)), "writes to"),
    "a recurrent layer": (disguised.Recurrent, "operator 'lstm'"),
    "attention weights at the end": (disguised.Weights, "attention scores or probabilities"),
    "a learned key": (lambda: disguised.Torch(add_bias_kv=True), "4 queries attend to 5 keys"),
    "a key of zeros": (lambda: disguised.Torch(add_zero_attn=True), "4 queries attend to 5 keys"),
    "softmax with one more": (
        with_(weigh=lambda self, s: functional.pad(s, (0, 1)).softmax(-1)[..., :-1]),
        "attention scores|mask|scores",
    ),
    "distances": (with_(score=lambda self, q, k: -torch.cdist(q, k)), "operator 'cdist'"),
    "heads of other tokens": (
        with_(score=lambda self, q, k: q.reshape(-1, 4, 2, 4).transpose(1, 2) @ k.mT),
        "different weights for different tokens",
    ),
    "one number": (with_(end=lambda self, y: y[:, 0]), "expected a classifier with logits"),
    "a module that stays in training": (disguised.Training, "in training mode"),
    "torch.cond": (with_(start=disguised.conditional), "operator 'gt'"),
    "Holdfast's model with another forward": (own(kind=disguised.Inherited), "operator 'elu'"),
    "Holdfast's model with another call": (own(kind=disguised.InheritedCall), "operator 'elu'"),
    "Holdfast's model with a hook": (
        own(lambda model: model.head.register_forward_hook(lambda m, a, y: functional.elu(y)) and None),
        "operator 'elu'",
    ),
}


#: Refused as others are, by an operator that is not known; or accepted as others are.
SLOW = {
    "relu6", "round", "sign", "floor division", "remainder", "sort", "maximum over tokens", "max pooling", "Fourier",
    "an exponential", "softplus", "distances", "complex numbers", "reflections at the border", "a recurrent layer",
    "probabilities renormalised", "normalised queries", "clamp from above", "clamp from below", "a loop on values",
    "log softmax at the end", "softmax over heads", "a key of zeros", "some tokens attend", "twice relu", "abs",
    "a fixed choice of tokens", "a mask of entries", "relu of relu", "tokens twice", "one token",
}  # fmt: skip


def quick_and_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", quick_and_slow(REFUSED))
def test_what_cannot_be_proved_is_refused(name: str) -> None:
    build, words = REFUSED[name]
    model, example = stirred(build()), pictures() if "Holdfast" in name else tokens(1 if "alone" in name else 2)
    with pytest.raises(ConversionError, match=words):
        to_network(model, example)


# -- words


IDS = torch.tensor([[5, 9, 2, 7]])


def test_words_move_where_they_are_looked_up() -> None:
    check(stirred(disguised.Words()), torch.cat([IDS, IDS.flip(1)]))
    with pytest.raises(ConversionError, match="looks up words 2 times"):
        to_network(stirred(disguised.LookedUpTwice()), IDS)
    with pytest.raises(ConversionError, match="Words cannot be read"):  # weights are changed at every look-up
        to_network(stirred(disguised.Words(max_norm=1.0)), IDS)
    with pytest.raises(InputError, match="attention_mask is a float tensor"):
        to_network(stirred(disguised.MaskedWords()), {"input_ids": IDS, "attention_mask": torch.ones(1, 4)})
    check(stirred(disguised.MaskedWords()), {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]])})


def test_a_hook_on_all_modules_is_part_of_the_model() -> None:
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: functional.elu(output) if isinstance(module, nn.Linear) else output
    )
    try:
        with pytest.raises(ConversionError, match="operator 'elu'"):
            to_network(stirred(own()()), pictures())
    finally:
        everywhere.remove()


def test_a_forward_put_into_a_class_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = stirred(own()()), Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda self, x: functional.elu(old(self, x)))
    with pytest.raises(ConversionError, match="operator 'elu'"):
        to_network(model, pictures())


# -- accepted, and certified as what they are

ACCEPTED: dict[str, Build] = {
    "values less their mean": with_(value=lambda self, v: v - v.mean(-2, keepdim=True)),
    "a module named ReLU": replaced(act=disguised.ReLU),
    "a Linear with its own forward": replaced(up=lambda: disguised.Linear(8, 6)),
    "a hook on the head": hook("head", lambda y: 3 * y.flip(-1) + 1),
    "a hook before attention": changed(
        lambda model: model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,)) and None
    ),
    "a parametrisation with a buffer": changed(disguised.parametrised),
    "a call of its own": disguised.OwnCall,
    "a lying derivative": with_(activate=lambda self, u: disguised.Straight.apply(u)),
    "a detached branch": with_(start=lambda self, x: x + 2 * x.detach()),
    "no_grad inside": with_(activate=lambda self, u: torch.no_grad()(torch.tanh)(u)),
    "writes through views": with_(start=disguised.through_view),
    "writes between views": with_(start=disguised.aliased),
    "scores scaled twice": with_(score=lambda self, q, k: (q / 2) @ k.mT / 2 * 3),
    "negative scores": with_(score=lambda self, q, k: -(q @ k.mT)),
    "a mask of -10000": with_(weigh=disguised.soft_mask),
    "a mask of the least number": with_(weigh=disguised.least),
    "memory tokens": disguised.Memory,
    "keys before queries": with_(weigh=lambda self, s: s.mT.softmax(-2).mT),
    "LayerNorm over all tokens": replaced(norm=lambda: nn.LayerNorm((4, 8))),
    "LayerNorm over the tokens": with_(start=lambda self, x: functional.layer_norm(x.mT, (4,)).mT),
    "a fixed choice of tokens": with_(pool=lambda self, x: x[:, [2, 0, 2]].sum(1)),
    "a mask of entries": with_(start=lambda self, x: x.masked_fill(torch.eye(4, 8).bool(), 0.5)),
    "abs": with_(activate=lambda self, u: u.abs()),
    "minus relu of minus": with_(activate=lambda self, u: -torch.relu(-u)),
    "twice relu": with_(activate=lambda self, u: 2 * torch.relu(u) - 1),
    "sigmoid": with_(activate=lambda self, u: 1.5 * torch.sigmoid(2 * u) - 0.5),
    "relu of relu": with_(activate=lambda self, u: torch.relu(torch.relu(u) - 0.2)),
    "a steep leaky relu": with_(activate=lambda self, u: functional.leaky_relu(u, 1.5)),
    "a gate by itself": with_(activate=lambda self, u: torch.tanh(u) * (u.flip(-1) + 1)),
    "logits by name": with_(end=lambda self, y: {"logits": y, "answer": y.argmax(-1)}),
    "a tuple of one": with_(end=lambda self, y: (y,)),
    "squeeze and excite": disguised.Excited,
    "one token": with_(start=lambda self, x: x[:, :1]),
    "tokens twice": with_(start=lambda self, x: x.repeat(1, 2, 1)),
    "some tokens attend": with_(start=lambda self, x: torch.cat([x[:, :2] + self.attend(x[:, :2]), x[:, 2:]], 1)),
    "queries alone": with_(score=lambda self, q, k: q @ q.mT),
    "queries and keys added": with_(score=lambda self, q, k: (q + k) @ k.mT),
    "a scripted module": replaced(act=lambda: torch.jit.script(nn.ReLU())),
    "norms of instances and groups": disguised.Norms,
    "GLU": with_(activate=lambda self, u: functional.glu(torch.cat([u, 2 * u], -1))),
    "almost GELU of erf": with_(activate=lambda self, u: 0.5 * u * (1 + torch.erf(0.7 * u))),
    "Holdfast's model": own(),
}


@pytest.mark.parametrize("name", quick_and_slow(ACCEPTED))
def test_what_is_accepted_is_what_the_model_computes(name: str) -> None:
    images = "Holdfast" in name or "instances" in name
    check(stirred(ACCEPTED[name]()), pictures() if images else tokens())
