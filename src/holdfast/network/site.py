"""A piece at its place in a network: its constants on balls around the exact input that it gets there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import NotApplicableError
from holdfast.layers.piece import LinearPiece, Need, Piece, SmoothPiece
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.curves import Curve, Grid, or_unbounded
from holdfast.linalg.rounding import frobenius_upper, outward

#: At more numbers than this the norm of a Jacobian costs too much, and attention moves by bounds without one.
LARGE = 2048


@final
@dataclass(frozen=True)
class _Around:
    """Constants of a piece as functions of the radius around the exact input; apart from the site, which keeps them."""

    piece: Piece
    u: Float64[Tensor, "b n d"]
    r: Float64[Tensor, " b"]
    a: Arithmetic[Any]

    def __call__(self, constant: Callable[[Arithmetic[Any], Tensor, Any], Any]) -> Callable[[Tensor], Tensor]:
        def evaluate(rho: Tensor) -> Tensor:
            radii = outward(rho + self.r.unsqueeze(-1)) if bool((self.r > 0).any()) else rho
            return or_unbounded(self.a.number(constant(self.a, self.u, self.a.lift(radii))))

        return evaluate

    def reach(self, rho: Float64[Tensor, "b e"], need: Need = "smallest") -> Float64[Tensor, "b e"]:
        """‖f(u + δ) - f(u)‖ <= ‖f(u + δ) - f(ũ)‖ + ‖f(ũ) - f(u)‖."""
        moved = self(self.piece.reach_for(need))
        if not bool((self.r > 0).any()):
            return moved(rho)
        return outward(moved(rho) + moved(torch.zeros_like(rho[..., :1])))


@final
class Site:
    """One piece f at its nominal input ũ, which is a float64 tensor within r of the exact input u.

    Radii rho (b, e) are of balls around u; the constants are those of the ball of radius rho + r around ũ, which holds
    it. All of them are tensors, rounded up where the arithmetic is proved.

    Args:
        piece: f.
        u: (b, n, d) ũ.
        r: (b) r >= ‖u - ũ‖_F.
        scale: gives (b) a radius of interest, on which the grid of radii is built; called where it is needed.
        a: the arithmetic; it serves this site alone.
    """

    def __init__(
        self,
        piece: Piece,
        u: Float64[Tensor, "b n d"],
        r: Float64[Tensor, " b"],
        scale: Callable[[], Float64[Tensor, " b"]],
        a: Arithmetic[Any],
    ) -> None:
        self.piece, self.u, self.r, self._scale, self.a = piece, u, or_unbounded(r), scale, a
        self._around = _Around(piece, u, self.r, a)
        self._patience = 0.25 if piece.costly else -1.0
        # Balls larger than their centre prove nothing as a rule, and cost much.
        free = isinstance(piece, LinearPiece) or not isinstance(piece, SmoothPiece)
        self._limit = torch.full_like(r, sys.float_info.max) if free else 1 + frobenius_upper(u)

    @cached_property
    def _grid(self) -> Grid:
        return Grid(self._scale, self._limit)

    @cached_property
    def _reach(self) -> Curve:
        return Curve(self._grid, self._around.reach)

    @cached_property
    def _gain(self) -> Curve:
        return Curve(self._grid, self._around(self.smooth_piece.gain))

    @cached_property
    def _curvature(self) -> Curve:
        return Curve(self._grid, self._around(self.smooth_piece.curvature))

    @property
    def smooth(self) -> bool:
        return isinstance(self.piece, SmoothPiece)

    @property
    def large(self) -> bool:
        """Whether so many numbers enter that the norm of a Jacobian costs too much."""
        return self.u.shape[-2] * self.u.shape[-1] > LARGE

    @property
    def smooth_piece(self) -> SmoothPiece:
        """The piece, where it has derivatives."""
        if not isinstance(self.piece, SmoothPiece):
            raise NotApplicableError(f"{type(self.piece).__name__} has a kink: it has no derivative to use")
        return self.piece

    @property
    def proved(self) -> bool:
        return self.a.guarantee == "proved"

    def gain(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of ‖Df‖ on the ball: ‖Df(u)‖ + rho β(rho), or the piece's own."""
        level = self._grid.level(rho)
        here = self.gain_here.unsqueeze(-1)
        drift = rho * self._curvature(level)
        own = self._gain(torch.where(drift <= self._patience * here, self._grid.beyond, level))
        return outward(torch.minimum(here + drift, own))

    @property
    def gain_here(self) -> Float64[Tensor, " b"]:
        """A bound of ‖Df‖ between u and ũ."""
        if self._slope is None:
            return self._gain(self._here).squeeze(-1)
        return outward(self._slope + self.r * self.curvature_here)

    @cached_property
    def _slope(self) -> Float64[Tensor, " b"] | None:
        """‖Df(ũ)‖, where the piece offers it."""
        slope = self.smooth_piece.slope(self.a, self.u)
        return None if slope is None else self.a.number(slope)

    @property
    def curvature_here(self) -> Float64[Tensor, " b"]:
        """A bound of ‖D²f‖ between u and ũ."""
        return self._curvature(self._here).squeeze(-1)

    def astray(self, r: Float64[Tensor, " b"]) -> Float64[Tensor, " b"]:
        """A bound of ‖f(w) - f(ũ)‖ for ‖w - ũ‖ <= r, where r is at most the distance that the site allows for."""
        if not bool((r > 0).any()):
            return r
        # So near to ũ the exact slope has little to add: it is worth its norm for few numbers only.
        if self.smooth and self.u.shape[-2:].numel() < LARGE and not isinstance(self.piece, LinearPiece):
            return self.gain_here * r
        reach = self.piece.reach_for("near")
        return self.a.number(reach(self.a, self.u, self.a.lift(r.unsqueeze(-1)))).squeeze(-1)

    @property
    def _here(self) -> Tensor:
        return torch.full_like(self.r, self._grid.zero, dtype=torch.int64).unsqueeze(-1)

    def curvature(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of ‖D²f[g, g]‖ on the ball, for unit g."""
        return self._curvature(self._grid.level(rho))

    def reach(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of ‖f(u + δ) - f(u)‖: from both derivatives, or the piece's own.

        The latter is taken on the next ball of the grid, or on the one before it with the gain from there on.
        """
        if not self.smooth:
            return self.own_reach(rho)
        level = self._grid.level(rho)
        linear, bent = self.gain_here.unsqueeze(-1) * rho, rho.square() * self._curvature(level) / 2
        level = torch.where(bent <= self._patience * linear, self._grid.beyond, level)
        lower = torch.where(level == self._grid.beyond, self._grid.beyond, level - 1)
        gain = self.gain(rho)
        onward = self._reach(lower) + (rho - self._grid.radius(lower)).clamp(min=0) * gain
        own = torch.minimum(self._reach(level), torch.where(level == self._grid.beyond, torch.inf, onward))
        return outward(torch.minimum(torch.minimum(linear + bent, rho * gain), own))

    def own_reach(self, rho: Float64[Tensor, "b e"], need: Need = "smallest") -> Float64[Tensor, "b e"]:
        """The piece's own bound of ‖f(u + δ) - f(u)‖, at these very radii: for a few of them it costs less.

        Args:
            rho: the radii.
            need: what the bounds by which attention moves are asked for.
        """
        known = rho <= self._limit.unsqueeze(-1)
        return torch.where(known, self._around.reach(torch.where(known, rho, 0.0), need), torch.inf)
