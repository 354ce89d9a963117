"""The state of a training in one file, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.storage import read_metadata, read_tensors, write_tensors
from holdfast.train.config import completed

_KEY = "holdfast_training"


@final
class Checkpoint:
    """A file with the weights, the state of the optimisers and whatever else a training run has to remember.

    Args:
        path: of the file.
        identity: what the training is; a file of another one is refused. Keys that configs have gained since the file
            was written have their defaults.
        shard_size: the most bytes of one file.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], shard_size: int | None = None) -> None:
        self._path, self._shard_size = path, shard_size
        self._identity = _as_stored(identity)

    def exists(self) -> bool:
        """Whether there is something to resume from."""
        return self._path.exists()

    def write(
        self,
        model: nn.Module,
        optimisers: Mapping[str, torch.optim.Optimizer],
        loss_sum: Tensor,
        notes: Mapping[str, Any],
    ) -> None:
        """Writes everything that the next step depends on; random numbers depend on the seed and the step alone."""
        tensors = {f"model.{name}": _briefly(t) for name, t in model.state_dict().items()} | {"loss_sum": loss_sum}
        for name, optimiser in optimisers.items():
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}.{index}.{key}": t for key, t in state.items()}
        content = {"identity": self._identity, "notes": notes}
        write_tensors(self._path, tensors, {_KEY: json.dumps(content)}, shard_size=self._shard_size)

    def read(
        self, model: nn.Module, optimisers: Mapping[str, torch.optim.Optimizer], loss_sum: Tensor
    ) -> dict[str, Any]:
        """Puts everything back and returns the notes."""
        content = json.loads(read_metadata(self._path).get(_KEY, "{}"))
        if not content:
            raise InputError(f"{self._path} is not the checkpoint of a training; name another folder")
        stored = _as_stored(completed(content["identity"]))
        for key in stored.keys() | self._identity.keys():
            if stored.get(key) != self._identity.get(key):
                raise InputError(
                    f"{self._path} belongs to another training: {_difference(key, stored, self._identity)}; name "
                    "another folder, or start afresh (resume=False, --no-resume)"
                )
        tensors = read_tensors(self._path)
        loss_sum.copy_(tensors.pop("loss_sum"))
        model.load_state_dict(_within("model", tensors))
        for name, optimiser in optimisers.items():
            states: dict[int, dict[str, Tensor]] = {}
            for key, t in _within(name, tensors).items():
                index, _, what = key.partition(".")
                states.setdefault(int(index), {})[what] = t
            optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
        notes: dict[str, Any] = content["notes"]
        return notes


def _as_stored(identity: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    stored: dict[str, Any] = json.loads(json.dumps(identity))
    return stored


def _briefly(t: Tensor) -> Tensor:
    """The same numbers, in half precision if nothing is lost by that."""
    half = t.half()
    return half if t.dtype == torch.float32 and torch.equal(half.float(), t) else t


def _within(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}


def _difference(key: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The innermost key that differs, in words."""
    before, now = stored.get(key), wanted.get(key)
    if isinstance(before, dict) and isinstance(now, dict):
        inner = next(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        return _difference(inner, before, now)
    return f"{key} was {before!r} and is {now!r}"
