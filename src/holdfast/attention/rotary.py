"""Rotary positions: a linear map of queries and keys that depends on the token's position (Su et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg.rounding import Array, Ball, as_ball, lift

Pairing = Literal["half", "interleaved"]


@final
@dataclass(frozen=True, eq=False)
class Rotary:
    """R_i q = cos_i ∘ q + sin_i ∘ T q on the first r entries of a query or key at position i; the others stay.

    T turns each pair of entries by a right angle: (a, b) becomes (-b, a). The scores are scale · (R_i q_i) · (R_j k_j).
    Any numbers will do for cos and sin: what is computed from them uses only that R_i is linear.

    Args:
        cos: (n, r) with r even, or (b…, n, r) where inputs have positions of their own.
        sin: like cos.
        pairing: "half" (entry m is paired with m + r/2) or "interleaved" (2m with 2m + 1).
    """

    cos: Float[Tensor, "*b n r"]
    sin: Float[Tensor, "*b n r"]
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        if self.pairing not in get_args(Pairing):
            raise InputError(f'pairing is {self.pairing!r}; expected "half" or "interleaved"')
        if self.cos.shape != self.sin.shape or self.cos.ndim < 2 or self.cos.shape[-1] % 2:
            raise InputError(
                f"rotary cos has shape {tuple(self.cos.shape)} and sin {tuple(self.sin.shape)}; "
                "expected the same (n, r) or (b, n, r), with r even"
            )

    @property
    def n(self) -> int:
        """How many positions there are."""
        return self.cos.shape[-2]

    @property
    def r(self) -> int:
        """How many entries of a head are turned."""
        return self.cos.shape[-1]

    @property
    def batch(self) -> torch.Size:
        return self.cos.shape[:-2]

    def turn(self, q: Array) -> Array:
        """R_i q_i for every head and position: (…, h, n, k) to the same."""
        cos, sin, partner = self._coefficients(q)
        return q * cos + q[..., partner] * sin

    def turn_keys(self, k: Array, bias: Array | None) -> Array:
        """R_j (k_j + bias) minus the mean of R_j bias, which is constant along the rows of scores: (…, h, n, k)."""
        if bias is None:
            return self.turn(k)
        added = self.turn(bias.unsqueeze(-2).expand(*k.shape[-3:]))
        return self.turn(k) + (added - as_ball(added).mid.mean(-2, keepdim=True))

    def turn_back(self, q: Array, rows: slice | None = None) -> Array:
        """R_iᵀ q_i, the transpose; only for the positions `rows`, where they are given."""
        cos, sin, partner = self._coefficients(q, rows)
        return q * cos + (q * sin)[..., partner]

    @cached_property
    def norm(self) -> float:
        """A proved bound of ‖R_i‖ over all positions: 1, but for the rounding of cos and sin, where R_i is a rotation.

        R_i turns each pair of entries by a 2 x 2 matrix, [[a, b], [c, d]], whose norm is half the sum of
        |(a + d, b - c)| and |(a - d, b + c)|; the entries that stay have norm 1.
        """
        partner, sign = self._turned
        cos, sin = (Ball.exact(t.double()) for t in (self.cos, self.sin * sign))
        other_cos, other_sin = cos[..., partner], sin[..., partner]
        along, across = cos + other_cos, sin - other_sin
        flipped, crossed = cos - other_cos, sin + other_sin
        norms = (along.square() + across.square()).sqrt() + (flipped.square() + crossed.square()).sqrt()
        return max(1.0, float((norms * 0.5).upper.max()) if self.r else 1.0)

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Rotary:
        """The same with another dtype or on another device."""
        return replace(self, cos=self.cos.to(device=device, dtype=dtype), sin=self.sin.to(device=device, dtype=dtype))

    def part(self, batch: torch.Size, start: int, stop: int) -> Rotary:
        """For members `start` to `stop` of a flattened batch of inputs."""
        if not self.batch:
            return self
        cos, sin = (t.expand(*batch, *t.shape[-2:]).flatten(0, -3)[start:stop] for t in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)

    def by_head(self) -> Rotary:
        """For inputs whose last batch dimension is the heads'."""
        return replace(self, cos=self.cos.unsqueeze(-3), sin=self.sin.unsqueeze(-3)) if self.batch else self

    def members(self, batch: torch.Size, index: tuple[Tensor, ...]) -> Rotary:
        """For the members `index` of a batch of inputs."""
        if not self.batch:
            return self
        return replace(self, cos=_members(self.cos, batch, index), sin=_members(self.sin, batch, index))

    def at(self, batch: torch.Size, index: tuple[Tensor, ...]) -> Rotary:
        """One position for each of some members of (batch…, n): the last index is the position."""
        cos, sin = (t.expand(*batch, *t.shape[-2:])[index].unsqueeze(-2) for t in (self.cos, self.sin))
        return replace(self, cos=cos, sin=sin)

    @cached_property
    def _turned(self) -> tuple[Tensor, Tensor]:
        """The partner of each turned entry, and the sign with which it comes."""
        m = torch.arange(self.r, device=self.cos.device)
        first = m < self.r // 2 if self.pairing == "half" else m % 2 == 0
        step = self.r // 2 if self.pairing == "half" else 1
        return torch.where(first, m + step, m - step), torch.where(first, -1.0, 1.0).to(self.cos)

    def _coefficients(self, q: Array, rows: slice | None = None) -> tuple[Array, Array, Tensor]:
        """What multiplies an entry, what multiplies its partner, and which that is, for all k entries of a head."""
        if (k := q.shape[-1]) not in self._by_width:
            partner, sign = self._turned
            cos = torch.nn.functional.pad(self.cos, (0, k - self.r), value=1.0)
            sin = torch.nn.functional.pad(self.sin * sign, (0, k - self.r))
            others = torch.arange(self.r, k, device=partner.device)
            self._by_width[k] = cos.unsqueeze(-3), sin.unsqueeze(-3), torch.cat([partner, others])
        cos, sin, partner = self._by_width[k]
        if rows is not None:
            cos, sin = cos[..., rows, :], sin[..., rows, :]
        return lift(cos, q), lift(sin, q), partner

    @cached_property
    def _by_width(self) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """What `_coefficients` gives for heads of each width."""
        return {}


def _members(t: Tensor, batch: torch.Size, index: tuple[Tensor, ...]) -> Tensor:
    return t.expand(*batch, *t.shape[-2:])[index]
