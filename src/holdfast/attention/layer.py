"""One layer of softmax dot-product self-attention, with what today's models do to its scores.

Notation: b batch, h heads, g key-value heads, n tokens, d width, k head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from holdfast.attention import checks
from holdfast.attention.head_norm import HeadNorm, Placed, with_column
from holdfast.attention.named_tensors import WEIGHTS, named_options, read_arguments
from holdfast.attention.rotary import Rotary
from holdfast.errors import InputError
from holdfast.linalg.rounding import Array, lift
from holdfast.storage import Pathlike, read_tensors, write_tensors

_TERMS = ("rotary", "score_bias", "q_norm", "k_norm", "soft_cap", "sinks")
_ARGUMENTS = (*WEIGHTS, "scale", "residual", "mask", "causal", *_TERMS)


@dataclass(frozen=True)
class Weights(Generic[Array]):
    """The weights with key-value heads repeated to h heads, in the arithmetic of an input."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    b_q: Array | None
    b_k: Array | None
    b_v: Array | None
    b_o: Array | None


@dataclass(frozen=True)
class AttentionParts(Generic[Array]):
    """What one pass computes: queries, keys, values (…,h,n,k), probabilities (…,h,n,n), heads' outputs (…,h,n,k)."""

    q: Array
    k: Array
    v: Array
    p: Array
    y: Array


@final
class AttentionLayer:
    """F(X) = residual · X + Σ_l P_l X W_l^V W_l^O with P_l = softmax(scale · X W_l^Q (X W_l^K)ᵀ), biases allowed.

    Args:
        w_q: (h, d, k) query maps: q_l = x @ w_q[l].
        w_k: (g, d, k) key maps; g divides h, and head l uses key-value head l // (h / g).
        w_v: (g, d, k_v) value maps; k_v is mostly k.
        w_o: (h, k_v, d_out) output maps; d_out may differ from d when residual is 0.
        b_q: (h, k) biases, and likewise b_k (g, k), b_v (g, k), b_o (d_out).
        b_k: see b_q.
        b_v: see b_q.
        b_o: see b_q.
        scale: of the scores; default 1/sqrt(k).
        residual: H = residual · I.
        mask: bool, True where a query (row) may attend to a key (column): (n, n) or (b…, n, n).
        causal: a query attends to no later key.
        rotary: position-dependent maps R_i: the scores are then scale · (R_i q_i) · (R_j k_j).
        score_bias: a constant added to the scores: (n, n), (h, n, n) or (b…, h, n, n).
        q_norm: how queries are normalised (`HeadNorm`), before or after positions turn them.
        k_norm: the same for the keys.
        soft_cap: c; every score s becomes c · tanh(s / c), before a bias is added and the mask applied.
        sinks: (h) a logit of each head that takes part in softmax as one more key without a value.

    Example:
        >>> layer = AttentionLayer.from_module(torch.nn.MultiheadAttention(32, 4))
        >>> layer(torch.randn(8, 10, 32)).shape
        torch.Size([8, 10, 32])
    """

    def __init__(
        self,
        w_q: Float[Tensor, "h d k"],
        w_k: Float[Tensor, "g d k"],
        w_v: Float[Tensor, "g d k_v"],
        w_o: Float[Tensor, "h k_v d_out"],
        b_q: Float[Tensor, "h k"] | None = None,
        b_k: Float[Tensor, "g k"] | None = None,
        b_v: Float[Tensor, "g k_v"] | None = None,
        b_o: Float[Tensor, " d_out"] | None = None,
        scale: float | None = None,
        residual: float = 0.0,
        mask: Bool[Tensor, "*b n n"] | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        score_bias: Float[Tensor, "*bh n n"] | None = None,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        soft_cap: float | None = None,
        sinks: Float[Tensor, " h"] | None = None,
    ) -> None:
        self.w_q, self.w_k, self.w_v, self.w_o = w_q, w_k, w_v, w_o
        self.b_q, self.b_k, self.b_v, self.b_o = b_q, b_k, b_v, b_o
        checks.weights(self._tensors())
        self.scale = 1 / math.sqrt(self.k) if scale is None else float(scale)
        self.residual = float(residual)
        self.mask, self.causal = mask, bool(causal)
        self.rotary, self.score_bias = rotary, score_bias
        self.q_norm, self.k_norm, self.sinks = q_norm, k_norm, sinks
        self.soft_cap = None if soft_cap is None else float(soft_cap)
        checks.options(self)
        checks.score_terms(self)

    # -- sizes

    @property
    def h(self) -> int:
        return self.w_q.shape[0]

    @property
    def g(self) -> int:
        return self.w_k.shape[0]

    @property
    def d(self) -> int:
        return self.w_q.shape[1]

    @property
    def k(self) -> int:
        return self.w_q.shape[2]

    @property
    def d_out(self) -> int:
        return self.w_o.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.w_q.dtype

    @property
    def device(self) -> torch.device:
        return self.w_q.device

    def __repr__(self) -> str:
        options = [f"residual={self.residual:g}"] if self.residual else []
        options += [f"mask={tuple(self.mask.shape)}"] if self.mask is not None else []
        options += ["causal=True"] if self.causal else []
        options += [f"rotary={tuple(self.rotary.cos.shape)}"] if self.rotary is not None else []
        options += [f"score_bias={tuple(self.score_bias.shape)}"] if self.score_bias is not None else []
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            options += [] if norm is None else [f"{name}={norm.kind}"]
        options += [f"soft_cap={self.soft_cap:g}"] if self.soft_cap is not None else []
        options += ["sinks"] if self.sinks is not None else []
        sizes = f"h={self.h}, g={self.g}, d={self.d}, k={self.k}, d_out={self.d_out}"
        return f"AttentionLayer({', '.join([sizes, str(self.dtype), *options])})"

    # -- the layer as a function

    def __call__(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d_out"]:
        """The output F(x)."""
        checks.same_dtype(self, x)
        checks.input(self, x)
        return self.output(x, self.run(x))

    def attention(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b h n n"]:
        """The attention probabilities of every head."""
        checks.same_dtype(self, x)
        checks.input(self, x)
        return self.run(x).p

    def run(self, x: Array) -> AttentionParts[Array]:
        """One pass over x, with its parts kept; x may also be a ball."""
        w = self.weights(x)
        placed_q, placed_k = self.placed(x)
        q, k, v = placed_q.value, placed_k.value, project(x, w.w_v, w.b_v)
        p = self.probabilities(q @ k.mT * self.scale)
        return AttentionParts(q, k, v, p, p @ v)

    def placed(self, x: Array) -> tuple[Placed[Array], Placed[Array]]:
        """The queries and the keys at x, as they meet, with their derivatives."""
        w = self.weights(x)
        query = Placed(project(x, w.w_q, w.b_q), self.q_norm, self.rotary)
        return query, Placed(project(x, w.w_k, w.b_k), self.k_norm, self.rotary)

    def probabilities(self, scores: Array) -> Array:
        """Softmax of scale · QKᵀ (…, h, n, n), with all that is done to scores, over the keys that the mask allows."""
        return self.softmax(self.complete(scores))

    def softmax(self, scores: Array) -> Array:
        """Softmax of complete scores; with sinks a row sums to less than 1."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = lift(self.sinks[:, None, None], scores)
        return with_column(scores, sinks).softmax(-1)[..., :-1]

    def whole_rows(self, p: Tensor) -> Tensor:
        """Probabilities (…, h, n, n) with what sinks take as one more entry, so that every row sums to 1."""
        return p if self.sinks is None else torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0.0)], -1)

    def complete(self, scores: Array) -> Array:
        """Scores scale · QKᵀ (…, h, n, n) capped, with the score bias added, and -inf where the mask forbids."""
        if self.soft_cap is not None:
            scores = (scores / self.soft_cap).tanh() * self.soft_cap
        if self.score_bias is not None:
            scores = scores + lift(self.score_bias, scores)
        allowed = self.allowed(scores.shape[-1])
        return scores if allowed is None else scores.masked_fill(~allowed.unsqueeze(-3).to(scores.device), -math.inf)

    def cap_slope(self, parts: AttentionParts[Array]) -> Array | None:
        """(…, h, n, n) the derivative of the soft cap at the scores of a pass; None without a cap."""
        if self.soft_cap is None:
            return None
        return -((parts.q @ parts.k.mT * (self.scale / self.soft_cap)).tanh().square() - 1.0)

    @property
    def beyond_dot_products(self) -> str | None:
        """What makes the scores other than a bias and dot products of linear queries and keys, in words, or None."""
        normed = self.q_norm is not None or self.k_norm is not None
        parts = {"query-key norms": normed, "a soft cap": self.soft_cap is not None, "sinks": self.sinks is not None}
        return " and ".join(name for name, there in parts.items() if there) or None

    def output(self, x: Array, parts: AttentionParts[Array]) -> Array:
        """F(x) from the parts of its pass."""
        w = self.weights(x)
        out = merge_heads(parts.y) @ w.w_o.flatten(0, 1)
        if w.b_o is not None:
            out = out + w.b_o
        return out + x * self.residual if self.residual else out

    def weights(self, like: Array) -> Weights[Array]:
        """The weights in the arithmetic of `like`, one key-value head for every query head."""
        repeats = self.h // self.g
        tensors = {
            name: lift(t.repeat_interleave(repeats, 0) if name[2] in "kv" and repeats > 1 else t, like)
            for name, t in self._tensors().items()
        }
        return Weights(**{name: tensors.get(name) for name in WEIGHTS})  # type: ignore[arg-type]

    def allowed(self, n: int) -> Bool[Tensor, "*b n n"] | None:
        """Which key each query may attend to, or None where every pair is allowed."""
        if not self.causal:
            return self.mask
        lower = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
        return lower if self.mask is None else lower & self.mask

    # -- other forms

    def replace(self, **arguments: Any) -> AttentionLayer:
        """The same layer with some of the constructor's arguments replaced."""
        unknown = sorted(set(arguments) - set(_ARGUMENTS))
        if unknown:
            raise InputError(f"replace got {', '.join(unknown)}; a layer has {', '.join(_ARGUMENTS)}")
        return AttentionLayer(**({name: getattr(self, name) for name in _ARGUMENTS} | arguments))

    def to(
        self,
        *where: torch.dtype | torch.device | str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> AttentionLayer:
        """The same layer with another dtype or on another device, by name or, as in torch, by position."""
        for given in where:
            if isinstance(given, torch.dtype):
                dtype = given
            else:
                device = given
        moved: dict[str, Any] = {}
        for name in _ARGUMENTS:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                moved[name] = value.to(device=device, dtype=None if value.dtype == torch.bool else dtype)
            elif isinstance(value, Rotary | HeadNorm):
                moved[name] = value.to(dtype, device)
        return self.replace(**moved)

    def double(self) -> AttentionLayer:
        """The same layer in float64: float32 weights are float64 weights, exactly."""
        return self if self.dtype == torch.float64 else self.to(torch.float64)

    def with_mask(self, mask: Bool[Tensor, "*b n n"] | None) -> AttentionLayer:
        """The same layer with another mask."""
        return self.replace(mask=mask)

    def part(self, batch: torch.Size, start: int, stop: int) -> AttentionLayer:
        """The layer for members `start` to `stop` of a flattened batch of inputs: what each has is cut to them."""
        mask, bias = _cut(self.mask, 2, batch, start, stop), _cut(self.score_bias, 3, batch, start, stop)
        rotary = None if self.rotary is None else self.rotary.part(batch, start, stop)
        if mask is self.mask and rotary is self.rotary and bias is self.score_bias:
            return self
        return self.replace(mask=mask, rotary=rotary, score_bias=bias)

    @classmethod
    def from_module(
        cls,
        module: nn.MultiheadAttention | nn.TransformerEncoderLayer,
        *,
        residual: float = 0.0,
        mask: Bool[Tensor, "*b n n"] | None = None,
        causal: bool = False,
    ) -> AttentionLayer:
        """The self-attention of a torch module: `nn.MultiheadAttention` or that of `nn.TransformerEncoderLayer`.

        Args:
            module: where the weights are; they are shared, not copied.
            residual: H of the layer; the module's own output is residual 0.
            mask: bool, True where attention is allowed (torch's sdpa convention, not MultiheadAttention's).
            causal: a query attends to no later key.
        """
        attention = module.self_attn if isinstance(module, nn.TransformerEncoderLayer) else module
        if isinstance(module, nn.TransformerDecoderLayer):
            raise InputError(
                "from_module got TransformerDecoderLayer, whose cross-attention takes keys and values from another "
                "tensor; pass its self_attn, or certify the whole: networks attend to a fixed memory"
            )
        if not isinstance(attention, nn.MultiheadAttention):
            raise InputError(
                f"from_module got {type(module).__name__}; expected nn.MultiheadAttention or "
                "nn.TransformerEncoderLayer; for other modules pass the weights to AttentionLayer"
            )
        checks.module(attention)
        d, h = attention.embed_dim, attention.num_heads
        w_in = attention.in_proj_weight.detach()
        w_q, w_k, w_v = (w.mT.reshape(d, h, d // h).movedim(1, 0) for w in w_in.chunk(3))
        tensors: dict[str, Any] = {"w_q": w_q, "w_k": w_k, "w_v": w_v}
        tensors["w_o"] = attention.out_proj.weight.detach().mT.reshape(h, d // h, d)
        if attention.in_proj_bias is not None:
            biases = attention.in_proj_bias.detach().reshape(3, h, d // h)
            tensors |= {"b_q": biases[0], "b_k": biases[1], "b_v": biases[2]}
        if attention.out_proj.bias is not None:
            tensors["b_o"] = attention.out_proj.bias.detach()
        return cls(**tensors, residual=residual, mask=mask, causal=causal)

    def save(self, path: Pathlike) -> None:
        """Writes the layer as safetensors, tensors named as the constructor's arguments."""
        write_tensors(path, self._tensors() | named_options(self))

    @classmethod
    def load(cls, path: Pathlike) -> AttentionLayer:
        """Reads a layer that `save` wrote, or any safetensors file with tensors named as the arguments."""
        return cls.from_tensors(read_tensors(path), source=str(path))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], source: str = "the tensors") -> AttentionLayer:
        """A layer from named tensors; `scale`, `residual` and `causal` are 0-dimensional ones."""
        return cls(**read_arguments(tensors, source))

    def _tensors(self) -> dict[str, Any]:
        return {name: t for name in WEIGHTS if (t := getattr(self, name)) is not None}


def _cut(t: Tensor | None, own: int, batch: torch.Size, start: int, stop: int) -> Tensor | None:
    """Members `start` to `stop` of a tensor (b…, own…) over a flattened batch, or the tensor itself without b."""
    if t is None or t.ndim <= own:
        return t
    return t.expand(*batch, *t.shape[-own:]).flatten(0, -own - 1)[start:stop]


def project(x: Array, w: Array, b: Array | None) -> Array:
    """X W_l + b_l for every head: (…, n, d) to (…, h, n, k), in one product."""
    y = split_heads(x @ join_heads(w), w.shape[0])
    return y if b is None else y + b.unsqueeze(-2)


def join_heads(w: Array) -> Array:
    """Input maps side by side: (h, d, k) to (d, h k)."""
    return w.movedim(0, 1).flatten(-2, -1)


def split_heads(x: Array, h: int) -> Array:
    """(…, n, h k) to (…, h, n, k)."""
    return x.reshape(*x.shape[:-1], h, x.shape[-1] // h).movedim(-2, -3)


def merge_heads(x: Array) -> Array:
    """(…, h, n, k) to (…, n, h k)."""
    return x.movedim(-3, -2).flatten(-2, -1)
