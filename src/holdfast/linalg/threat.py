"""What may become of an input: everything within a distance, and within the range of inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg.rounding import Ball, down, frobenius, up
from holdfast.results import Norm


@final
@dataclass(frozen=True)
class Threat:
    """All points within a radius of an input, in one of two norms.

    Args:
        norm: "l2" over the whole input, or "linf", where every number moves by itself.
        clip: the smallest and the largest number that an input may hold; only for "linf". None for no limits.
    """

    norm: Norm = "l2"
    clip: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise InputError(f'norm is {self.norm!r}; expected "l2" or "linf"')
        if self.clip is None:
            return
        if self.norm == "l2":
            raise InputError(f"clip is {self.clip} with the norm l2, whose balls are not clipped; expected norm='linf'")
        numbers = isinstance(self.clip, tuple | list) and len(self.clip) == 2
        if not numbers or not all(isinstance(end, int | float) and math.isfinite(end) for end in self.clip):
            raise InputError(f"clip is {self.clip!r}; expected two numbers, such as (0, 1)")
        object.__setattr__(self, "clip", (float(self.clip[0]), float(self.clip[1])))
        if not self.clip[0] < self.clip[1]:
            raise InputError(f"clip is {self.clip}; expected the smaller number first, then a larger one")

    @property
    def boxed(self) -> bool:
        """Whether the points form boxes."""
        return self.norm == "linf"

    @property
    def most(self) -> float:
        """The radius at which nothing is left to be reached."""
        return math.inf if self.clip is None else self.clip[1] - self.clip[0]

    def check(self, x: Tensor) -> None:
        """Refuses inputs that are not between the ends themselves."""
        if self.clip is not None and not bool(((x >= self.clip[0]) & (x <= self.clip[1])).all()):
            raise InputError(
                f"the inputs hold numbers from {float(x.min()):g} to {float(x.max()):g}, and clip is {self.clip}; "
                "expected inputs within it"
            )

    def ends(
        self, x: Float64[Tensor, "b n d"], eps: Float64[Tensor, " b"]
    ) -> tuple[Float64[Tensor, "b n d"], Float64[Tensor, "b n d"]]:
        """The lower and upper corners of boxes that hold all points within eps, coordinate by coordinate."""
        r = eps[:, None, None]
        lower, upper = down(x - r), up(x + r)
        return (lower, upper) if self.clip is None else (lower.clamp(min=self.clip[0]), upper.clamp(max=self.clip[1]))

    def cuts(self, x: Float64[Tensor, "b n d"], eps: Float64[Tensor, " b"]) -> bool:
        """Whether the ends take something off one of these boxes; a box of radius 0 has nothing to lose."""
        x, eps = x[eps > 0], eps[eps > 0]
        whole = Threat(self.norm).ends(x, eps)
        return any(not torch.equal(one, other) for one, other in zip(self.ends(x, eps), whole, strict=True))

    def inside(self, z: Tensor) -> Tensor:
        """Points (…, n, d) brought between the ends."""
        return z if self.clip is None else z.clamp(*self.clip)

    def length(self, v: Float64[Tensor, "*b n d"]) -> Float64[Tensor, "*b"]:
        """The norm of perturbations, in plain float64."""
        length: Tensor = v.abs().amax((-2, -1)) if self.boxed else torch.linalg.vector_norm(v, dim=(-2, -1))
        return length

    def steepness(self, gradient: Float64[Tensor, "*b n d"]) -> Float64[Tensor, "*b"]:
        """The dual norm: how fast a function with this gradient grows at most, in plain float64."""
        return gradient.abs().sum((-2, -1)) if self.boxed else self.length(gradient)

    def distance(self, x: Float64[Tensor, "*b n d"], moved: Float64[Tensor, "*b n d"]) -> Float64[Tensor, "*b"]:
        """How far points are from x, rounded up."""
        if self.boxed:
            return up((moved - x).abs().amax((-2, -1)))
        return frobenius(Ball.exact(moved) - Ball.exact(x)).upper

    def to_dict(self) -> dict[str, str]:
        """In words; nothing for l2 balls."""
        words: dict[str, str] = {"norm": self.norm} if self.boxed else {}
        return words if self.clip is None else words | {"clip": f"{self.clip[0]!r},{self.clip[1]!r}"}


L2 = Threat()
LINF = Threat("linf")
