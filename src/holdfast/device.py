"""Where numbers are computed."""

from __future__ import annotations

import torch

from holdfast.errors import InputError


def check_device(name: str) -> torch.device:
    """The device of this name, which torch must know and this machine must have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _unknown(name) from None
    if device.type not in ("cpu", "cuda"):
        raise _unknown(name)  # a device without float64 can prove nothing
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"the device is {name!r} and this torch finds no GPU; use cpu, or a torch built for CUDA")
        if device.index is not None and device.index >= count:
            raise InputError(f"the device is {name!r}; this machine has cuda:0 to cuda:{count - 1}")
    return device


def waits(device: torch.device) -> bool:
    """Whether reading a number waits for all work queued on the device so far."""
    return device.type != "cpu"


def _unknown(name: str) -> InputError:
    return InputError(f"the device is {name!r}; expected cpu, cuda, or one GPU such as cuda:1")
