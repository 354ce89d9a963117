"""Where training runs: with accelerate, if installed, on several devices and machines; otherwise with torch alone."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, final

import torch

from holdfast.device import check_device
from holdfast.extras import require


@final
@dataclass(frozen=True)
class Accelerated:
    """One process of a training.

    Attributes:
        device: of its tensors.
        rank: its number; process 0 writes files.
        count: of processes.
        prepare: makes a module, on its device, share its gradients with the other processes.
        agree: the answer of process 0 to a question that all of them ask.
    """

    device: torch.device
    rank: int = 0
    count: int = 1
    prepare: Callable[[Any], Any] = lambda module: module
    agree: Callable[[bool], bool] = lambda answer: answer


def find_place(device: str | None = None) -> Accelerated:
    """The place of this process; a device that is named is used alone, without accelerate."""
    if device is None and find_spec("accelerate") is not None:
        accelerate = require("accelerate", "hf")
        accelerator = accelerate.Accelerator()
        own, count = accelerator.device, accelerator.num_processes
        if count > 1:  # its threads must not outlive the interpreter
            atexit.register(accelerator.end_training)

        def agree(answer: bool) -> bool:
            return bool(accelerate.utils.broadcast(torch.tensor(answer, device=own))) if count > 1 else answer

        return Accelerated(own, accelerator.process_index, count, accelerator.prepare, agree)
    return Accelerated(check_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
