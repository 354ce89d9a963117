"""What the expansion of a curved piece must satisfy: jets are derivatives, and no remainder is above its bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.layers import LayerNorm, Mlp, Piece, Product, RMSNorm, SmoothEntries, SmoothPiece, SmoothProject
from holdfast.layers.attention.piece import Attention
from holdfast.layers.expansion import LocalExpansion
from holdfast.linalg import Ball, forms
from holdfast.linalg.directions import Directions
from holdfast.testing.draw import Dice, draw, plain
from holdfast.testing.draw_pieces import draw_piece
from holdfast.testing.pieces import PieceCase
from holdfast.testing.probes import climb

#: The kinds of pieces that have an expansion.
EXPANDED: tuple[type[Piece], ...] = (Attention, LayerNorm, Mlp, RMSNorm, SmoothProject, Product, SmoothEntries)
_STARTS = 12
_CHANNELS = tuple(itertools.product((0, 1), repeat=3))
_NOISE = 1e-13  # the least relative error that is thought of
_NOTHING = 1e-120  # what is left by rounding of a remainder that vanishes, as that of a product does


@dataclass(frozen=True, eq=False)
class LocalCase:
    """A piece, the jets at its input, and forms of what else its input moves by.

    Attributes:
        name: what is particular about them.
        piece: a curved piece.
        u: (b, n, d) where it stands.
        J: (p, b, n, d) jets along directions.
        H: (pairs, b, n, d) jets along pairs.
        Q: (b, n, p, p) forms of F.
        eps: the radius.
    """

    name: str
    piece: Piece
    u: Tensor
    J: Tensor
    H: Tensor
    Q: Tensor
    eps: float

    @property
    def directions(self) -> Directions:
        return Directions(len(self.J), self.u.device)

    def local(self) -> tuple[LocalExpansion, Tensor, Tensor]:
        """The expanded piece, and the jets at its output."""
        local = self.piece.expand(self.u, self.directions)
        assert local is not None
        with torch.no_grad():
            return local, local.jets(1, self.J), local.jets(2, self.H)

    def moves(self, G: Float64[Tensor, "*s b p"]) -> tuple[Tensor, Tensor]:
        """J[G] and H[G, G]/2."""
        full = self.directions.full(self.H)
        bent = torch.einsum("...bp,...bq,pqbnd->...bnd", G, G, full)
        return torch.einsum("...bp,pbnd->...bnd", G, self.J), bent / 2


def draw_local(kind: type[Piece], seed: int, *, extreme: bool = True) -> LocalCase:
    """A piece of one kind with jets, some of them zero or alike, and forms; the same for the same seed.

    Attention that is not `extreme` has queries, keys and values apart from each other.
    """
    dice = Dice(1000 * list(EXPANDED).index(kind) + seed)
    if kind is Attention:
        layer = plain(draw(seed))
        case = PieceCase(layer.name, Attention(layer.layer), layer.x.double())
        if not extreme:
            return _apart(dice)
    else:
        case = draw_piece(kind, seed, extreme=extreme)
    u = case.u
    p, (b, n, d) = dice.pick(1, 2, 3, 5, 8), u.shape
    size = dice.pick(1.0, 1.0, 1e-2, float(u.abs().max()) + 1e-9)
    eps = dice.pick(1e-6, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)
    J, H = size * dice.normal(p, b, n, d), size * dice.normal(p * (p + 1) // 2, b, n, d) * dice.pick(0.1, 1.0, 5.0)
    shape = dice.pick("", "", "one token", "rank one", "alike")
    if shape == "one token":
        J = J * torch.nn.functional.one_hot(torch.tensor(dice.pick(*range(n))), n).to(J).unsqueeze(-1)
    if shape == "rank one":
        J = J[:, :, :1, :1] * dice.normal(1, b, n, d)
    if shape == "alike":
        J = J[:, :, :1].expand(p, b, n, d).contiguous()
    rank = dice.pick(1, p)
    R = dice.normal(b, n, p, rank) * (size * eps**2 * dice.pick(1e-3, 0.1, 1.0))
    # A part that is missing lets the bounds of the others stand alone.
    parts = dice.pick("JHF", "JHF", "J", "H", "F", "JF", "HF", "JH")
    J, H, R = J * ("J" in parts), H * ("H" in parts), R * ("F" in parts)
    words = [case.name, shape, f"p {p}", f"eps {eps:g}", parts]
    return LocalCase(", ".join(word for word in words if word), case.piece, u, J, H, R @ R.mT, eps)


def _apart(dice: Dice) -> LocalCase:
    """Attention whose queries, keys and values each have a channel of their own, of which some stay at zero.

    Almost every term of the bounds then stands alone in some draw; and with two keys the mean of a product is the
    product of mean squares, so that it is nearly attained.
    """
    n, p = dice.pick(2, 2, 3), dice.pick(1, 1, 2)
    w_q, w_k, w_v = (row.reshape(1, 3, 1) for row in torch.eye(3).double() * dice.pick(0.5, 1.0, 2.0))
    piece = Attention(AttentionLayer(w_q, w_k, w_v, dice.normal(1, 1, 2), scale=1.0))

    def somewhere(*shape: int) -> Tensor:
        return dice.normal(*shape, 2, n, 3) * torch.tensor(dice.pick(*_CHANNELS)).double()

    eps = dice.pick(1e-6, 1e-6, 0.03, 0.3)
    u, J, H = somewhere(), somewhere(p), somewhere(p * (p + 1) // 2)
    R = dice.normal(2, n, p, p) * dice.pick(0.0, 0.0, eps**2, 10 * eps**2, min(0.1, 1e4 * eps**2))
    moved = ["".join(c for c, on in zip("qkv", t.any(-2).flatten(0, -2).any(0), strict=True) if on) for t in (u, J, H)]
    return LocalCase(
        f"apart: {moved}, n {n}, p {p}, eps {eps:g}, F {float(R.abs().max()):.0e}", piece, u, J, H, R @ R.mT, eps
    )


def shares(case: LocalCase, seed: int, inside: float = 1.0) -> dict[str, float]:
    """The largest remainders that an ascent finds on a sphere inside the ball, as shares of their bounds.

    Radii of 1e-3 and below are so small that differences would drown in rounding: there the first term of the remainder
    is taken for it, by derivatives.

    Args:
        case: the piece and how it moves.
        seed: of the starts.
        inside: the radius of the sphere, as a share of the ball's.
    """
    local, _, _ = case.local()
    eps = torch.full((len(case.u),), case.eps, dtype=torch.float64)
    with torch.no_grad():
        third, largest = local.third(case.Q, eps), forms.root(case.Q) * case.eps
        fourth = local.fourth(largest, eps)
    scale = torch.ones(()).double() if (factors := local.scale()) is None else factors
    p, (b, n, d) = len(case.J), case.u.shape

    leading = case.eps <= 1e-3 and inside == 1

    def share(g: Tensor, F: Tensor, *, careful: bool = False) -> Tensor:
        """Of `third` for the first half of the starts, of `fourth` for the second; less what may be rounding."""
        g = g.squeeze(-2) / torch.linalg.vector_norm(g, dim=(-2, -1)).unsqueeze(-1)
        size = torch.einsum("sbp,bnpq,sbq->sbn", g, case.Q, g).clamp(min=1e-300).sqrt() * case.eps
        size = torch.cat([size[:_STARTS], largest.expand_as(size[_STARTS:])])
        F = F / torch.linalg.vector_norm(F, dim=-1, keepdim=True) * size.unsqueeze(-1)
        bound = torch.einsum("sbp,bmpq,sbq->sbm", g, third, g) * case.eps**2
        bound = torch.cat([bound[:_STARTS], fourth.expand_as(bound[_STARTS:])])
        rest, noise = _remainders(case, g * (case.eps * inside), F, leading=leading, careful=careful)
        length = (torch.linalg.vector_norm(rest / scale, dim=-1) - noise / scale.abs().amin()).clamp(min=0.0)
        return torch.where(torch.isfinite(bound), length / (bound + _NOTHING), 0.0).amax(-1)

    dice = Dice(seed)
    start = dice.normal(2 * _STARTS, b, 1, p), dice.normal(2 * _STARTS, b, n, d)
    with torch.no_grad():
        reached = share(*climb(share, torch.ones(()).double(), *start), careful=True).nan_to_num(nan=0.0)
    return {"third": float(reached[:_STARTS].max()), "fourth": float(reached[_STARTS:].max())}


def _remainders(case: LocalCase, G: Tensor, F: Tensor, *, leading: bool, careful: bool) -> tuple[Tensor, Tensor]:
    """What is beyond degree 2 and Df[F], then what is beyond degree 3; and, if `careful`, how far off it may be."""
    f = case.piece
    assert isinstance(f, SmoothPiece)
    a, h = case.moves(G)
    u = case.u.expand(F.shape).contiguous()

    def bent(v: Tensor) -> Tensor:
        return f.push2(v, a, a)

    terms = [_along(bent, u, a) / 6, f.push2(u, a, h)]
    if leading:
        more = [_along(lambda v: _along(bent, v, a), u, a) / 24, _along(bent, u, h) / 2]
        more += [f.push2(u, h, h) / 2, f.push2(u, a, F)]
        parts = [
            torch.cat([x[:_STARTS], y[_STARTS:]])
            for x, y in zip((*terms, 0 * terms[0], 0 * terms[0]), more, strict=True)
        ]
    else:
        third = (terms[0] + terms[1]).clone()
        third[:_STARTS] = 0.0
        parts = [f.value(u + a + h + F), -f.value(u), -f.push(u, a + h), -f.push(u, F), -bent(u) / 2, -third]
    rest = torch.stack(parts).sum(0)
    noise = torch.zeros(rest.shape[:-1], dtype=torch.float64)
    if careful:
        largest = sum(torch.linalg.vector_norm(part, dim=-1).amax(-1, keepdim=True) for part in parts)
        noise = noise + largest * _accuracy(f, u, a, h + F)
    return rest, noise


def _accuracy(f: SmoothPiece, u: Tensor, a: Tensor, e: Tensor) -> Tensor:
    """(s, b, 1) how well the piece and its derivatives are known where they are taken, relatively."""
    here, one = Ball.exact(u), Ball.exact(a)
    there = here + one + Ball.exact(e)
    known = f.value(here), f.value(there), f.push(here, one), f.push2(here, one, one)
    ratios = [torch.linalg.matrix_norm(ball.rad) / (torch.linalg.matrix_norm(ball.mid) + 1e-300) for ball in known]
    return 10 * torch.stack(ratios).nan_to_num(nan=1.0, posinf=1.0).amax(0).clamp(_NOISE, 1.0).unsqueeze(-1)


def _along(f: Callable[[Tensor], Tensor], u: Tensor, a: Tensor) -> Tensor:
    """The derivative of f at u along a."""
    slope: Tensor = torch.func.jvp(f, (u,), (a,))[1]
    return slope
