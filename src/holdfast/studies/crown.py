"""CROWN of auto_LiRPA beside our own proofs, if the user has installed it; nothing here needs it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError
from holdfast.extras import available


def require_auto_lirpa(asked: bool) -> None:
    """Refuses the option --auto-lirpa if the library is missing."""
    if asked and not available("auto_LiRPA"):
        raise HoldfastError("--auto-lirpa needs auto_LiRPA, which is not installed; install it, or leave it out")


def crown_radius(model: nn.Module, image: Tensor, answer: Tensor) -> tuple[float, float]:
    """The largest l2 radius, to 1 %, at which CROWN proves the answer; and the seconds of the search."""
    from auto_LiRPA import PerturbationLpNorm

    began = time.perf_counter()
    proves = _prover(model, image, answer)
    radius = largest(lambda eps: proves(image, PerturbationLpNorm(norm=2, eps=eps)))
    return radius, time.perf_counter() - began


def crown_proves_box(model: nn.Module, lower: Tensor, upper: Tensor, answer: Tensor) -> tuple[bool, float]:
    """Whether CROWN proves the answer everywhere in a box whose corners are inputs of the model; and the seconds."""
    from auto_LiRPA import PerturbationLpNorm

    began = time.perf_counter()
    proves = _prover(model, lower, answer)
    proved = proves((lower + upper) / 2, PerturbationLpNorm(norm=float("inf"), x_L=lower, x_U=upper))
    return proved, time.perf_counter() - began


def _prover(model: nn.Module, example: Tensor, answer: Tensor) -> Callable[[Tensor, Any], bool]:
    """Whether every other class stays behind the answer, as a function of a centre and what may become of it."""
    from auto_LiRPA import BoundedModule, BoundedTensor

    with warnings.catch_warnings(action="ignore"):  # hundreds of lines of torch's tracer
        bounded: Any = BoundedModule(model, torch.empty_like(example))
    classes = model(example).shape[1]
    leads = torch.eye(classes)[answer].unsqueeze(1) - torch.eye(classes).unsqueeze(0)
    leads = leads[:, [j for j in range(classes) if j != int(answer)]]

    def proves(centre: Tensor, perturbation: Any) -> bool:
        x = BoundedTensor(centre, perturbation)
        with warnings.catch_warnings(action="ignore"):
            lower, _ = bounded.compute_bounds(x=(x,), C=leads, method="backward", bound_upper=False)
        return bool((lower > 0).all())

    return proves


def largest(proved: Callable[[float], bool], start: float = 0.01) -> float:
    """The largest radius, to 1 %, for which the answer is yes; 0 where it is no for the first one tried."""
    low, high = 0.0, start
    while proved(high) and high < 10:
        low, high = high, 2 * high
    while low > 0 and high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if proved(middle) else (low, middle)
    return low
