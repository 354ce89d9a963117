"""How the scores depend on the tokens: by one matrix for each head, or with rotary positions by one for each pair.

With u_lij = ∂s_lij/∂x_i, up to a constant along the row, and a_lij = ∂s_lij/∂x_j, both at X, the scores move by
γ_i · u_lij + a_lij · γ_j + γ_iᵀ A_lij γ_j. Without rotary positions A_lij = A_l, u_lij = A_l x_j and a_lij = a_li; with
them A_lij = scale · W_l^Q R_iᵀ R_j W_l^Kᵀ (docs/math/rotary.md). The bounds ask a `ScoreMap` for norms of these.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Generic, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.jacobian import Folded
from holdfast.attention.layer import Weights
from holdfast.attention.rotary import Rotary
from holdfast.attention.rows import Rows
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import up

_CHUNK = {"cpu": 2**21, "cuda": 2**27}  # numbers of one temporary


class AnyScoreMap(ABC, Generic[Array]):
    """What constants of a ball are made of: how the scores move around X.

    Args:
        a: the arithmetic.
        f: the layer at X, folded.
    """

    def __init__(self, a: Arithmetic[Array], f: Folded[Array]) -> None:
        self.a: Arithmetic[Array] = a
        self.f: Folded[Array] = f

    # -- the linear part at X

    @property
    def query_rows(self) -> Rows[Array]:
        """u_lij."""
        return self.f.query_rows

    @property
    def key_rows(self) -> Rows[Array]:
        """a_lij."""
        return self.f.key_rows

    # -- the bilinear part

    @property
    @abstractmethod
    def forms(self) -> tuple[Array, Array]:
        """(h, d, …) maps that stand for A_l and A_lᵀ; (r, b…, h, d, …) where they are others on every ball.

        For numbers w_l, (Σ_lij w_l² (g_iᵀA_lij g'_j)²)^½ <= ‖[w_1 A_1 … w_h A_h]‖ ‖G‖_F ‖G'‖_F, the same with the
        second ones, and ‖A_lij‖ <= ‖A_l‖.
        """

    # -- upper probabilities (Lemma 3)

    @abstractmethod
    def growth(self, norm_A: Array) -> tuple[Array, Array]:
        """ℓ_ij and κ_ij of Lemma 3 (a), (b…, h, n, n); norm_A is (h, 1, 1)."""

    @property
    @abstractmethod
    def apart(self) -> Array:
        """(b…, h, n, n) at (j, k) a bound of ‖u_lik - u_lij‖ for all i."""

    @property
    @abstractmethod
    def key_lengths2(self) -> Array:
        """(b…, h, n, 1) the largest ‖a_lij‖² over j."""

    # -- norms of the two linear parts

    @property
    @abstractmethod
    def own_keys(self) -> Array:
        """(b…, h, n, d) a_lii."""

    @property
    @abstractmethod
    def moments(self) -> Tensor:
        """(b…, h, n, n) about ‖u_lij - mean‖² + ‖a_lij‖²; a hint that no proof uses."""

    @abstractmethod
    def other_keys(self, factors: Array) -> Array:
        """(…, n) a bound of (Σ_lj f_li² (a_lij · g_j)²)^½ over ‖G‖_F = 1, for each row i; factors (…, h, n)."""

    # -- what is neither linear nor bilinear: nothing, but for norms

    def bend(self, weights: Array) -> Array | None:
        """(r, b…) a bound of (Σ_lij w_lij (q̂''_li · k̂_lj + q̂_li · k̂''_lj - c_li)²)^½ on the ball, or None for 0.

        Times r it bounds what bending adds to (Σ_lij w_lij (s'_lij - c_li)²)^½ on the way from X to Z.
        """
        return None

    def row_bend(self, weights: Tensor, norm: Array) -> tuple[Array, Array] | None:
        """(r, b…, n) what bending adds for each row, times r: by the row's own token, and by the others.

        Weights are (r, b…, h, n, n), and the norm of `other_keys` squared is (r, b…, h, n).
        """
        return None


class ScoreMap(AnyScoreMap[Array]):
    """The derivatives of scores of linear queries and keys, also for the norms that slopes are made of.

    Args:
        a: the arithmetic.
        layer: float64.
        f: the layer at X, folded.
    """

    def __init__(self, a: Arithmetic[Array], layer: AttentionLayer, f: Folded[Array]) -> None:
        AnyScoreMap.__init__(self, a, f)
        self._w: Weights[Array] = layer.weights(f.p)
        self._scale = layer.scale

    @property
    @abstractmethod
    def key_variations2(self) -> Array | None:
        """(b…, h, n, n) ‖a_lij - c_li‖² for some c_li; None where a_lij is the same for all j.

        Then keys that move alike move the scores of a row alike.
        """

    @abstractmethod
    def query_norm(self, *, centred: bool) -> Array:
        """(b…, h) a bound of (Σ_ij (g_i · u_lij)²)^½; `centred` where a constant may be taken off u_lij for each i."""

    @abstractmethod
    def key_norm(self, factors: Array | None = None) -> Array:
        """(…, h) a bound of (Σ_ij f_li² (a_lij · g_j)²)^½ over ‖G‖_F = 1, factors (…, h, n); default 1."""

    @abstractmethod
    def joint_key_norm(self, factors: Array) -> Array:
        """(…) a bound of (Σ_lij f_i² (a_lij · g_j)²)^½, all heads together; factors (…, n)."""


def score_map(a: Arithmetic[Array], layer: AttentionLayer, f: Folded[Array]) -> ScoreMap[Array]:
    """That of the layer."""
    return OneMap(a, layer, f) if layer.rotary is None else TurnedMaps(a, layer, f)


@final
class OneMap(ScoreMap[Array]):
    """Without rotary positions: u_lij = A_l x_j for all i, and a_lij = a_li for all j."""

    key_variations2 = None

    @cached_property
    def forms(self) -> tuple[Array, Array]:
        """A_l and A_lᵀ, each up to an isometry on the right, which no norm sees."""
        a, w = self.a, self._w
        return a.product(w.w_q * self._scale, w.w_k), a.product(w.w_k * self._scale, w.w_q)

    def growth(self, norm_A: Array) -> tuple[Array, Array]:
        query, f = self._centred_query, self.f
        turns = f.key @ query.mT
        return log_growth(f.p, distances_from_means(f.p, self._products), turns, self.key_lengths2, norm_A)

    @cached_property
    def apart(self) -> Array:
        lengths = self._products.diagonal(0, -2, -1).unsqueeze(-1)
        return root(lengths + lengths.mT - self._products * 2.0)

    @cached_property
    def key_lengths2(self) -> Array:
        return self.f.key.square().sum(-1, keepdim=True)

    @property
    def own_keys(self) -> Array:
        return self.f.key

    @property
    def moments(self) -> Tensor:
        query, number = self._centred_query, self.a.number
        return number(distances2(self.f.p @ query, query)) + number(self.f.key).square().sum(-1, keepdim=True)

    def other_keys(self, factors: Array) -> Array:
        return self.a.matrix_norm(factors.movedim(-2, -1).unsqueeze(-1) * self.f.key.movedim(-3, -2), rough=True)

    def query_norm(self, *, centred: bool) -> Array:
        rows = centred_rows(self.a, self.f.query_rows) if centred else self.f.query_rows
        return self.a.matrix_norm(rows.multiplied())

    def key_norm(self, factors: Array | None = None) -> Array:
        return self.a.matrix_norm(self.f.key if factors is None else factors.unsqueeze(-1) * self.f.key)

    def joint_key_norm(self, factors: Array) -> Array:
        return self.a.matrix_norm((factors.unsqueeze(-1).unsqueeze(-3) * self.f.key).flatten(-3, -2))

    @cached_property
    def _centred_query(self) -> Array:
        """Rows A x_j with a common constant taken off, which leaves differences alone and spares digits."""
        return self.f.query - self.a.number(self.f.query).mean(-2, keepdim=True)

    @cached_property
    def _products(self) -> Array:
        return self._centred_query @ self._centred_query.mT


@final
class TurnedMaps(ScoreMap[Array]):
    """With rotary positions: u_lij = W_l^Q R_iᵀ k̂_lj and a_lij = W_l^K R_jᵀ q̂_li, the scale in k̂ and in q̂.

    What holds for all pairs alike is in norms of W_l^Q and W_l^K, of q̂ and k̂, and in ρ >= ‖R_i‖.
    """

    def __init__(self, a: Arithmetic[Array], layer: AttentionLayer, f: Folded[Array]) -> None:
        ScoreMap.__init__(self, a, layer, f)
        assert layer.rotary is not None
        self._rotary: Rotary = layer.rotary
        self._rho = layer.rotary.norm
        self._asked: Array = f.key_rows.left
        self._keys: Array = f.query_rows.left - a.number(f.query_rows.left).mean(-2, keepdim=True)

    @cached_property
    def _norms(self) -> tuple[Array, Array]:
        """(h) ρ ‖W_l^Q‖ and ρ ‖W_l^K‖."""
        norms = self.a.matrix_norm
        return norms(self._w.w_q) * self._rho, norms(self._w.w_k) * self._rho

    @cached_property
    def forms(self) -> tuple[Array, Array]:
        """ρ² |scale| ‖W_l^K‖ W_l^Q, and the same with the roles exchanged."""
        w, (query, key), size = self._w, self._norms, up(abs(self._scale), 2**-50) * self._rho
        return w.w_q * (key * size)[:, None, None], w.w_k * (query * size)[:, None, None]

    def growth(self, norm_A: Array) -> tuple[Array, Array]:
        p = self.f.p
        return turned_growth(self._rotary, self._asked, self._keys, self._w.w_q, self._w.w_k, p, norm_A, self._lengths2)

    @cached_property
    def apart(self) -> Array:
        return root(distances2(self._keys, self._keys)) * self._norms[0][:, None, None]

    @cached_property
    def _lengths2(self) -> Array:
        """(b…, h, n, n) ‖a_lij‖²."""
        return squares_at_keys(self._rotary, self._asked, self._w.w_k)

    @cached_property
    def key_variations2(self) -> Array:
        return squares_at_keys(self._rotary, self._asked, self._w.w_k, self.f.p)

    @cached_property
    def key_lengths2(self) -> Array:
        return self._lengths2.amax(-1, keepdim=True)

    @cached_property
    def own_keys(self) -> Array:
        return self._rotary.turn_back(self._asked) @ self._w.w_k.mT

    @property
    def moments(self) -> Tensor:
        number, keys = self.a.number, self._keys
        size = number(self._norms[0]).square()[:, None, None]
        return number(distances2(self.f.p @ keys, keys)) * size + number(self._lengths2)

    def other_keys(self, factors: Array) -> Array:
        lengths = self._lengths2.movedim(-2, -3)  # (b…, i, h, j)
        squares = (factors.square().movedim(-2, -1).unsqueeze(-1) * lengths).sum(-2).amax(-1)
        longest = root((factors.square() * self._asked.square().sum(-1)).amax(-2))
        return root(squares).minimum(longest * self._joined_keys)

    @cached_property
    def _joined_keys(self) -> Array:
        """ρ ‖[W_1^K … W_h^K]‖."""
        return self.a.matrix_norm(side_by_side(self._w.w_k)) * self._rho

    def query_norm(self, *, centred: bool) -> Array:
        return self.a.matrix_norm(self._keys if centred else self.f.query_rows.left) * self._norms[0]

    def key_norm(self, factors: Array | None = None) -> Array:
        asked = self._asked if factors is None else factors.unsqueeze(-1) * self._asked
        return self.a.matrix_norm(asked) * self._norms[1]

    def joint_key_norm(self, factors: Array) -> Array:
        norms = self.a.matrix_norm(factors.unsqueeze(-1).unsqueeze(-3) * self._asked) * self._rho
        return self.a.matrix_norm(side_by_side(norms.unsqueeze(-1).unsqueeze(-1) * self._w.w_k))


# -- what the logarithms of the probabilities gain


def log_growth(p: Array, distances: Array, turns: Array, lengths2: Array, norm_A: Array) -> tuple[Array, Array]:
    """ℓ_ij and κ_ij of Lemma 3 (a): log p_ij grows by at most r ℓ_ij + r² κ_ij on the ball of radius r.

    Args:
        p: (…, h, n, n) the probabilities.
        distances: (…, h, n, n) ‖u_lij - Σ_k p_lik u_lik‖².
        turns: (…, h, n, n) a_lii · u_lij, up to a constant along the row.
        lengths2: (…, h, n, n) ‖a_lij‖², or (…, h, n, 1).
        norm_A: (h, 1, 1) ‖A_l‖.
    """
    eye = torch.eye(p.shape[-1], dtype=torch.float64, device=p.device)
    w_own = -(p.diagonal(0, -2, -1).unsqueeze(-1) - eye)  # w = e_j - p_i, at i
    squares = p.square()
    w_norm2 = squares.sum(-1, keepdim=True) - p * 2.0 + 1.0
    if lengths2.shape[-1] == 1:
        keys = w_norm2 * lengths2
    else:
        keys = (squares * lengths2).sum(-1, keepdim=True) - p * lengths2 * 2.0 + lengths2
    turn = turns - (p * turns).sum(-1, keepdim=True)
    slope = root(distances + turn * w_own * 2.0 + keys)
    return slope, (w_own.abs() + root(w_norm2)) * norm_A * 0.5


def turned_growth(
    rotary: Rotary,
    query: Array,
    key: Array,
    w_q: Array,
    w_k: Array,
    p: Array,
    norm_A: Array,
    lengths2: Array | None = None,
) -> tuple[Array, Array]:
    """The same from turned queries and keys: u_lij = W_l^Q R_iᵀ k_lj, a_lij = W_l^K R_jᵀ q_li."""
    distances = squares_at_queries(rotary, key, w_q, p)
    if lengths2 is None:
        lengths2 = squares_at_keys(rotary, query, w_k)
    own = rotary.turn(rotary.turn_back(query) @ (w_k.mT @ w_q))  # a_lii · u_lij = own_li · key_lj
    return log_growth(p, distances, own @ key.mT, lengths2, norm_A)


def squares_at_queries(rotary: Rotary, key: Array, w: Array, p: Array) -> Array:
    """(…, h, n, n) at (i, j) ‖W_l R_iᵀ (k_lj - Σ_m p_lim k_lm)‖² for keys (…, h, n, k)."""
    gram, squares = (w.mT @ w).unsqueeze(-3), []
    for rows in blocks(key):
        z = key.unsqueeze(-2) - (p[..., rows, :] @ key).unsqueeze(-3)  # (…, h, j, i, k)
        back = rotary.turn_back(z.flatten(-4, -3), rows).reshape(*z.shape)
        squares.append(((back @ gram) * back).sum(-1).mT)
    return joined(squares)


def squares_at_keys(rotary: Rotary, query: Array, w: Array, p: Array | None = None) -> Array:
    """(…, h, n, n) at (i, j) ‖W_l R_jᵀ q_li‖² for queries (…, h, n, k); with p, of R_jᵀ q_li minus its mean over j."""
    n, k = query.shape[-2:]
    gram, squares = (w.mT @ w).unsqueeze(-3), []
    for rows in blocks(query):
        z = query[..., rows, :].unsqueeze(-2)
        z = z.expand(*z.shape[:-2], n, k)  # (…, h, i, j, k)
        back = rotary.turn_back(z.flatten(-4, -3)).reshape(*z.shape)
        if p is not None:
            back = back - p[..., rows, :].unsqueeze(-2) @ back
        squares.append(((back @ gram) * back).sum(-1))
    return joined(squares)


def blocks(rows: Array) -> list[slice]:
    """Rows in blocks, so that what is held for each pair of one of them and any other, (…, h, i, n, k), stays small."""
    n, size = rows.shape[-2], math.prod(rows.shape)
    step = max(1, _CHUNK.get(rows.device.type, 2**21) // size)
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def joined(parts: list[Array]) -> Array:
    """Parts (…, some, n) that follow each other along the second last dimension."""
    first = parts[0]
    if isinstance(first, Ball):
        mids, rads = ([getattr(part, name) for part in parts] for name in ("mid", "rad"))
        return Ball(torch.cat(mids, -2), torch.cat(rads, -2))
    return torch.cat(parts, -2)


# -- small tools


def centred_rows(a: Arithmetic[Array], rows: Rows[Array]) -> Rows[Array]:
    """Rows with their mean over the tokens taken off: rows of probabilities' changes sum to zero, and do not see it."""
    return Rows(rows.left - a.number(rows.left).mean(-2, keepdim=True), rows.right, rows.rotary)


def side_by_side(matrices: Array) -> Array:
    """[M_1, …, M_h] from (…, h, m, n)."""
    return matrices.movedim(-3, -2).flatten(-2, -1)


def distances_from_means(p: Array, products: Array) -> Array:
    """(…, n, n) ‖z_j - Σ_k p_ik z_k‖² for rows z with the given products z_j · z_k; p may be weights of any sum."""
    mixed = p @ products
    lengths = products.diagonal(0, -2, -1).unsqueeze(-2)
    return (mixed * p).sum(-1, keepdim=True) - mixed * 2.0 + lengths


def distances2(left: Array, right: Array) -> Array:
    """Squared distances of rows: (…, n, d) and (…, m, d) to (…, n, m)."""
    lengths = left.square().sum(-1, keepdim=True) + right.square().sum(-1, keepdim=True).mT
    return lengths - left @ right.mT * 2.0


def root(x: Array) -> Array:
    """The square root of a quantity that is not negative but for rounding."""
    return x.sqrt() if isinstance(x, Ball) else x.clamp(min=0).sqrt()
