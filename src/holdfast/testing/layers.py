"""Small layers of every kind, with inputs: seeded, in float64, and small enough for dense Jacobians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import AttentionLayer, HeadNorm, Rotary
from holdfast.attention.masks import alibi, sliding_window
from holdfast.attention.rotary import Pairing

_BATCH = 2
_TYPICAL = ("query-key norms", "more tokens than width", "fewer tokens, masked", "everything", "rotary, everything")


@dataclass(frozen=True, eq=False)
class Case:
    """A layer and inputs for it.

    Attributes:
        name: what is particular about them.
        layer: float64.
        x: (b, n, d) float64, or (n, d) for one member.
    """

    name: str
    layer: AttentionLayer
    x: Tensor

    @property
    def size(self) -> float:
        """What the entries of the layer's linear maps are made of: rounding errors are small beside it."""
        largest = {name: float(getattr(self.layer, name).abs().max()) for name in ("w_q", "w_k", "w_v", "w_o")}
        scores = 1 + largest["w_q"] * largest["w_k"]
        return (1 + float(self.x.abs().max())) * scores * (1 + largest["w_v"] * largest["w_o"])

    @property
    def plain(self) -> bool:
        """Whether the scores are one bilinear form of the tokens for each head, as in the papers."""
        return self.layer.rotary is None and self.layer.beyond_dot_products is None

    def member(self, index: int) -> Case:
        """One input of the batch, without batch dimension."""
        part = self.layer.part(self.x.shape[:1], index, index + 1)
        own: dict[str, Any] = {}
        if part.mask is not None and part.mask.ndim > 2:
            own["mask"] = part.mask[0]
        if part.score_bias is not None and part.score_bias.ndim > 3:
            own["score_bias"] = part.score_bias[0]
        if part.rotary is not None and part.rotary.batch:
            own["rotary"] = replace(part.rotary, cos=part.rotary.cos[0], sin=part.rotary.sin[0])
        return Case(f"{self.name}[{index}]", part.replace(**own), self.x[index])

    def permuted(self, order: Sequence[int]) -> Case:
        """The same tokens in another order; what each may attend to moves with them."""
        index = torch.tensor(list(order))
        allowed = self.layer.allowed(self.x.shape[-2])
        moved: dict[str, Any] = {"mask": None if allowed is None else allowed[..., index, :][..., index]}
        if (rotary := self.layer.rotary) is not None:
            moved["rotary"] = replace(rotary, cos=rotary.cos[..., index, :], sin=rotary.sin[..., index, :])
        if (bias := self.layer.score_bias) is not None:
            moved["score_bias"] = bias[..., index, :][..., index]
        layer = self.layer.replace(**moved, causal=False)
        return Case(f"{self.name}, permuted", layer, self.x[..., index, :])

    def float(self) -> Case:
        """The layer and the inputs rounded to float32."""
        return Case(f"{self.name}, float32", self.layer.to(torch.float32), self.x.float())


def changed(layer: AttentionLayer, **arguments: Any) -> AttentionLayer:
    """The layer with some of its arguments replaced."""
    return layer.replace(**arguments)


@dataclass(frozen=True)
class Elsewhere:
    """The same layer in other coordinates.

    Attributes:
        case: its tokens stand in another order, basis and unit of length, and its values have another unit.
        inputs: the old unit of length in the new one.
        values: likewise of the values.
    """

    case: Case
    inputs: float
    values: float


def elsewhere(case: Case) -> Elsewhere:
    """X → cXU with W → UᵀW/c, for an orthogonal U, and another order of the tokens.

    A residual needs the output in the coordinates of the input; without one the values have a unit of their own.
    """
    layer, c = case.layer, 5.0
    n, d = case.x.shape[-2:]
    U = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    unit = c if layer.residual else 3.0
    maps = {name: U.mT @ getattr(layer, name) / c for name in ("w_q", "w_k", "w_v")}
    maps["w_o"] = unit * (layer.w_o @ U if layer.d_out == d else layer.w_o)
    moved = Case(f"{case.name}, elsewhere", layer.replace(**maps), c * case.x @ U)
    return Elsewhere(moved.permuted([(i + 1) % n for i in range(n)][::-1]), c, unit)


@cache
def members(case: Case) -> list[Case]:
    """The inputs of a batch, one by one; a single input is its own member."""
    return [case] if case.x.ndim == 2 else [case.member(i) for i in range(len(case.x))]


def typical(chosen: Sequence[Case]) -> Sequence[Case]:
    """A few of the cases, for what does not depend much on the case."""
    names = {case.name for case in chosen}.intersection(_TYPICAL)
    if _TYPICAL[-1] in names:
        names.discard(_TYPICAL[-2])  # which has one thing less
    return [case for case in chosen if case.name in names] or chosen[:1]


def make_case(
    name: str,
    seed: int = 0,
    *,
    n: int = 4,
    d: int = 4,
    k: int = 2,
    h: int = 2,
    g: int | None = None,
    d_out: int | None = None,
    biases: bool = False,
    mask: Literal["shared", "each"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    residual: float = 0.0,
    sharpness: float = 1.0,
    size: float = 1.0,
    rotary: int = 0,
    pairing: Pairing = "half",
) -> Case:
    """A random layer with two inputs.

    Args:
        name: what is particular about it.
        seed: of the weights, biases, inputs and masks.
        n: tokens.
        d: width.
        k: width of a head.
        h: heads.
        g: key-value heads; default h.
        d_out: width of the output; default d.
        biases: all four, or none.
        mask: a random one for both inputs, or one for each; every token may attend to itself.
        causal: of the layer.
        scale: of the layer.
        residual: of the layer.
        sharpness: factor of the query maps.
        size: factor of the inputs.
        rotary: how many entries of a head are turned by random angles.
        pairing: of these entries.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    g, d_out = g or h, d_out or d
    weights: dict[str, Any] = {"w_q": normal(h, d, k) * sharpness, "w_k": normal(g, d, k), "w_v": normal(g, d, k)}
    weights["w_o"] = normal(h, k, d_out) / (h * k) ** 0.5
    if biases:
        weights |= {"b_q": normal(h, k), "b_k": normal(g, k), "b_v": normal(g, k), "b_o": normal(d_out)}
    x = normal(_BATCH, n, d) * size
    allowed = None
    if mask is not None:
        shape = (n, n) if mask == "shared" else (_BATCH, n, n)
        allowed = (torch.rand(shape, generator=generator) < 0.5) | torch.eye(n, dtype=torch.bool)
    turned = turning(3 * normal(n, rotary // 2), pairing) if rotary else None
    options: dict[str, Any] = {"scale": scale, "residual": residual, "mask": allowed, "causal": causal}
    return Case(name, AttentionLayer(**weights, **options, rotary=turned), x)


def turning(angles: Float[Tensor, "*b n m"], pairing: Pairing = "half") -> Rotary:
    """Rotations by the given angles of the pairs of entries."""
    turns = torch.cat([angles, angles], -1) if pairing == "half" else angles.repeat_interleave(2, -1)
    return Rotary(turns.cos(), turns.sin(), pairing)


def gaussian_case(
    seed: int, *, n: int, d: int, h: int, norm: float, row: float, residual: float = 1.0, batch: int = 1
) -> Case:
    """Gaussian d x d maps scaled to a spectral norm, divided among the heads, and tokens of one length.

    Args:
        seed: for everything random.
        n: tokens.
        d: width, a multiple of h.
        h: heads.
        norm: spectral norm of each full map.
        row: Euclidean length of each token.
        residual: of the layer.
        batch: inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(4, d, d, generator=generator, dtype=torch.float64)
    full = full * (norm / torch.linalg.matrix_norm(full, ord=2)[:, None, None])
    w_q, w_k, w_v = (w.reshape(d, h, d // h).movedim(1, 0) for w in full[:3])
    x = torch.randn(batch, n, d, generator=generator, dtype=torch.float64)
    x = x * (row / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    layer = AttentionLayer(w_q, w_k, w_v, full[3].reshape(h, d // h, d), residual=residual)
    return Case(f"norm {norm:g}, rows {row:.3g}, seed {seed}", layer, x)


@cache
def cases(seed: int = 0) -> tuple[Case, ...]:
    """Layers of every kind: heads, biases, masks, shapes, patterns of attention, degenerate weights and inputs."""
    return (
        make_case("plain", seed),
        make_case("one head", seed, h=1),
        make_case("grouped heads", seed, h=4, g=2),
        make_case("one key-value head", seed, h=3, g=1),
        make_case("biases", seed, biases=True),
        make_case("shared mask", seed, mask="shared"),
        make_case("mask for each input", seed, mask="each", biases=True),
        make_case("causal", seed, causal=True),
        make_case("causal and masked", seed, causal=True, mask="each"),
        make_case("residual", seed, residual=1.0),
        make_case("negative residual", seed, residual=-0.5),
        make_case("wide output", seed, d_out=7),
        _wide_values(make_case("narrow output and wide values", seed, d_out=2)),
        make_case("negative scale", seed, scale=-0.7),
        make_case("flat attention", seed, sharpness=1e-3),
        make_case("peaked attention", seed, sharpness=8.0),
        make_case("one-hot attention", seed, sharpness=300.0),
        _sink(make_case("sink token", seed, n=6)),
        _duplicates(make_case("duplicate tokens", seed)),
        make_case("one token", seed, n=1, residual=1.0),
        make_case("two tokens", seed, n=2),
        make_case("more tokens than width", seed, n=8, d=3, k=2),
        make_case("fewer tokens than width", seed, n=3, d=7, k=4),
        make_case("fewer tokens, masked", seed, n=3, d=6, biases=True, mask="each"),
        _zero(make_case("zero weights", seed, residual=1.0), "w_q", "w_k", "w_v", "w_o"),
        _zero(make_case("zero values", seed), "w_v"),
        _rank_one(make_case("rank-one weights", seed)),
        make_case("tiny input", seed, size=1e-8),
        make_case("large input", seed, size=20.0),
        make_case("everything", seed, h=4, g=2, biases=True, mask="each", causal=True, residual=1.0),
        make_case("rotary", seed, n=5, k=4, h=2, rotary=4),
        make_case("partial rotary", seed, k=3, biases=True, rotary=2, pairing="interleaved", causal=True),
        _sunk(make_case("sinks", seed, biases=True, mask="shared", residual=1.0)),
        _capped(_sunk(make_case("soft cap and sinks", seed, h=3, g=1, rotary=2))),
        _normed(make_case("query-key norms", seed, k=4, h=4, g=2, biases=True, rotary=2)),
        _normed(make_case("norms over all heads", seed, k=3, h=4, g=2, d_out=3, causal=True), across=True),
        _with_alibi(make_case("ALiBi and a window", seed, n=5, residual=1.0)),
        make_case("rotary, everything", seed, h=4, g=2, biases=True, mask="each", causal=True, residual=1.0, rotary=2),
    )


def random_case(seed: int) -> Case:
    """A layer with every option drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    g = pick(1, 2)
    d = pick(2, 3, 5)
    residual = pick(0.0, 1.0, -0.5)
    return make_case(
        f"random {seed}",
        seed,
        n=pick(1, 2, 3, 4, 6),
        d=d,
        k=pick(1, 2, 3),
        h=g * pick(1, 2),
        g=g,
        d_out=d if residual else pick(d, 1, 4),
        biases=pick(False, True),
        mask=pick(None, None, "shared", "each"),
        causal=pick(False, False, True),
        residual=residual,
        sharpness=pick(0.1, 1.0, 3.0, 10.0, 100.0),
        size=pick(1e-3, 0.3, 1.0, 1.0, 3.0, 30.0),
    )


def _sink(case: Case) -> Case:
    """Every query attends mostly to one token: its bias points along that token's key."""
    w_k, x = case.layer.w_k, case.x[0, 0]
    return Case(
        case.name, changed(case.layer, b_q=4 * (x @ w_k)), torch.cat([x.expand(_BATCH, 1, -1), case.x[:, 1:]], 1)
    )


def _sunk(case: Case) -> Case:
    """A logit of each head takes part in softmax."""
    return Case(case.name, case.layer.replace(sinks=torch.linspace(-1, 1, case.layer.h, dtype=torch.float64)), case.x)


def _capped(case: Case) -> Case:
    return Case(case.name, case.layer.replace(soft_cap=1.5), case.x)


def _with_alibi(case: Case) -> Case:
    """Scores fall with the distance, and queries look two tokens back."""
    h, n = case.layer.h, case.x.shape[-2]
    return Case(case.name, case.layer.replace(score_bias=alibi(h, n).double(), mask=sliding_window(n, 3)), case.x)


def _wide_values(case: Case) -> Case:
    """Values have another width than keys: each is one of the others twice as well."""
    layer = case.layer
    w_v, w_o = torch.cat([layer.w_v, layer.w_v[..., :1]], -1), torch.cat([layer.w_o, -2 * layer.w_o[:, :1]], 1)
    return Case(case.name, layer.replace(w_v=w_v, w_o=w_o), case.x)


def _normed(case: Case, *, across: bool = False) -> Case:
    """Queries and keys are normalised, the first ones before their positions turn them."""
    layer = case.layer
    weight = torch.linspace(0.5, 1.5, layer.k, dtype=torch.float64)
    q_norm = HeadNorm(weight, eps=0.1, across=across)
    k_norm = HeadNorm(weight, weight, 0.1, "layer", across, after_rotation=True)
    return Case(case.name, layer.replace(q_norm=q_norm, k_norm=k_norm), case.x)


def _duplicates(case: Case) -> Case:
    """All tokens of the first input are equal, and two of the second."""
    x = case.x.clone()
    x[0] = x[0, 0]
    x[1, 1] = x[1, 0]
    return Case(case.name, case.layer, x)


def _zero(case: Case, *names: str) -> Case:
    zeros = {name: torch.zeros_like(getattr(case.layer, name)) for name in names}
    return Case(case.name, changed(case.layer, **zeros), case.x)


def _rank_one(case: Case) -> Case:
    maps = {name: getattr(case.layer, name) for name in ("w_q", "w_k", "w_v", "w_o")}
    return Case(
        case.name, changed(case.layer, **{name: w[..., :1] @ w[..., :1, :] for name, w in maps.items()}), case.x
    )
