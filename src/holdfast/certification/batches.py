"""How many inputs are treated at once by default."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions import compositions
from holdfast.network.network import Network, Residual

_MOST = 1024  # inputs at once on an accelerator; an H200 is hardly faster with more
_UNKNOWN = 8  # on a device that is not on this machine
_SHARE = 0.8  # of the free memory
_COPIES = 8  # times the largest thing that a piece holds; 6.6 was observed on an H200
_BYTES = 8


def fitting(network: Network, x: Float64[Tensor, "1 n d"], method: str, device: str, processes: int) -> int:
    """A number of inputs that fit into an accelerator's memory, rounded to three leading bits.

    A batch that does not fit is halved when it fails, so this need not be exact.

    Args:
        network: the classifier.
        x: one input.
        method: the composition.
        device: the accelerator.
        processes: how many share it.
    """
    if not torch.cuda.is_available():
        return _UNKNOWN
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # kept by torch for reuse
    room = _SHARE * free / processes / (_COPIES * _BYTES * held_numbers(network, x, method))
    most = max(1, min(_MOST, int(room)))
    step = 1 << max(0, most.bit_length() - 3)
    return most // step * step


@torch.no_grad()
def held_numbers(network: Network, x: Float64[Tensor, "1 n d"], method: str) -> int:
    """About how many numbers the largest matrix has that is held for one input."""
    most, largest, u = 0, x.numel(), x
    for stage in network.stages:
        first = u
        for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
            most = max(most, piece.held_numbers(u))
            u = piece.value(u)
            largest = max(largest, u.numel())
        u = first + u if isinstance(stage, Residual) else u
    return most if compositions[method].for_large else max(most, largest**2)  # a Jacobian of all tokens
