"""A network of `repro cifar-vit` goes onto the shelf, with what the study has proved about it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.errors import InputError
from holdfast.models.shelf import Shelved, ShelvedRun, put_on_shelf
from holdfast.models.vit import VisionTransformer
from holdfast.studies.cifar_training import CifarNetwork, CifarTraining, load_network, save_network
from holdfast.studies.cifar_vit import CifarVitStudy
from holdfast.studies.cifar_vit_summary import RADIUS, CifarContent, CifarImage, summed_up
from holdfast.studies.records import read_numbers


def put_network_on_shelf(name: str, path: Path, numbers: Path) -> Shelved:
    """Copies a network onto the shelf.

    Args:
        name: on the shelf.
        path: of the network.
        numbers: the JSON file of `repro cifar-vit` with its images.
    """
    model, known = load_network(path)
    content, records = read_numbers(CifarVitStudy(), numbers)
    images = [one for one in records.of("image") if one.known == known]
    use = next((one for one in records.of("content") if one.network in {image.network for image in images}), None)
    if not images or use is None:
        raise InputError(f"{numbers} has no images and content of {path}; run repro cifar-vit on it first")
    if {one.place for one in images} != set(range(len(images))):
        raise InputError(f"{numbers} has gaps among the images of {path}; run repro cifar-vit on it first")
    run = _shown(images, json.loads(content["settings"]["method"]), content["command"])
    notes = {
        "seed": str(known.training.seed),
        "command": _command(known, path),
        "training": json.dumps(_record(model, known, use)),
    }
    with TemporaryDirectory() as folder:
        described = Path(folder) / path.name
        save_network(described, model, known, notes)
        return put_on_shelf(name, described, run)


def _shown(images: list[CifarImage], method: str, command: str) -> ShelvedRun:
    found, radius = summed_up("", images), f"{RADIUS:.6g}"
    clean = found.right / found.images
    accuracy, attacked = {radius: found.certified}, {radius: found.withstood}
    return ShelvedRun("cifar10", found.images, method, "proved", clean, accuracy, attacked, command)


def _command(known: CifarNetwork, path: Path) -> str:
    """What trains such a network again."""
    setting, usual = known.training, CifarTraining(known.training.recipe)
    given = [f for f in fields(setting) if getattr(setting, f.name) != getattr(usual, f.name)]
    options = [word for f in given for word in (f"--{f.name}", f"{getattr(setting, f.name):g}")]
    device = [] if known.place == "cpu" else ["--device", "cuda"]
    return shlex.join(["python", "examples/train_cifar_vits.py", setting.recipe, path.name, *options, *device])


def _record(model: VisionTransformer, known: CifarNetwork, use: CifarContent) -> dict[str, Any]:
    """The training, in the words of `run.json`."""
    return {
        "name": "cifar-vit",
        "config": {"model": model.arguments, "data": {"name": "cifar10"}, "train": asdict(known.training)},
        "seed": known.training.seed,
        "device": known.place,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step": known.training.steps,
        "steps": known.training.steps,
        "seconds": known.seconds,
        "test": {"split": "test", "inputs": use.images, "clean": use.clean, **asdict(use.content)},
    }
