"""Models that studies train once and keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.errors import InputError
from holdfast.studies.processes import Tell
from holdfast.studies.study import Workplace
from holdfast.train.config import TrainingConfig, agrees
from holdfast.train.loop import train


def train_once(config: TrainingConfig, folder: Path, place: Workplace, tell: Tell, device: str | None = None) -> Path:
    """The folder with the trained model; an earlier training is reused, or resumed."""
    if (folder / "model.safetensors").exists():
        if not agrees(training_record(folder)["config"], config.to_dict()):
            raise InputError(f"{folder} holds a model of another config; move it away, or give another --runs")
        return folder
    run = train(
        config,
        folder,
        data_dir=place.data_dir,
        device=device or place.device,
        command=place.command,
        progress=lambda now: tell(0.99 * now.step / now.steps),
    )
    if not run.finished:
        raise KeyboardInterrupt
    return folder


def training_record(folder: Path) -> dict[str, Any]:
    """What is stored of the training."""
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content
