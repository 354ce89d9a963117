"""The shelf: trained models that come with the package, each a file that says what is known about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.models import files
from holdfast.models.vit import VisionTransformer
from holdfast.network.digest import weights_digest
from holdfast.results import CertificationRun
from holdfast.storage import Pathlike, file_size, make_folder, read_metadata, read_tensors, write_tensors

LIMIT = 8_000_000  # bytes of one file

_KEY = "holdfast_shelf"


@final
@dataclass(frozen=True)
class ShelvedRun:
    """What a run of `holdfast certify`, or a study, showed about a model.

    Attributes:
        data: the data set and its split's checksum stand in the run; this is its name.
        inputs: how many were certified.
        method: the composition.
        guarantee: "proved", or "numerical": then `accuracy` is an estimate.
        clean: share of right answers.
        accuracy: certified, by radius.
        attacked: what survives an attack, by radius; empty if there was none.
        command: that made the run.
    """

    data: str
    inputs: int
    method: str
    guarantee: str
    clean: float
    accuracy: dict[str, float]
    attacked: dict[str, float]
    command: str

    @classmethod
    def of(cls, run: CertificationRun) -> ShelvedRun:
        """The numbers of a run that is complete."""
        if run.missing:
            raise InputError(f"the run lacks {len(run.missing)} inputs; certify them first: the same command resumes")
        radii = {f"{radius:.6g}": radius for radius in run.radii}
        return cls(
            run.data,
            len(run.records),
            run.settings["method"],
            run.settings["guarantee"],
            run.clean(),
            {name: run.accuracy(radius) for name, radius in radii.items()},
            {name: run.attacked(radius) for name, radius in radii.items()} if run.attacked_too else {},
            run.command or "",
        )


@final
@dataclass(frozen=True)
class Shelved:
    """A model on the shelf.

    Attributes:
        name: by which `holdfast.models.load` and `holdfast certify` know it; for a file elsewhere, that of its config.
        kind: the name of its class.
        config: what it is built from.
        seed: of its training.
        command: that trained it.
        training: the record of the training: config, versions, curves, content-off accuracy.
        certified: what was certified.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    seed: str
    command: str
    training: Mapping[str, Any]
    certified: tuple[ShelvedRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def shelved() -> tuple[Shelved, ...]:
    """The models on the shelf, by name."""
    return tuple(read_shelved(path) for path in sorted(files.SHELF.glob("*.safetensors")))


def put_on_shelf(name: str, path: Pathlike, *runs: CertificationRun | ShelvedRun) -> Shelved:
    """Copies a trained model onto the shelf, with its certified results.

    Args:
        name: on the shelf.
        path: of the model, as `holdfast.models.save` writes it.
        runs: of `holdfast certify` on the same weights, or what a study has shown about them.
    """
    if not name or Path(name).name != name:
        raise InputError(f"the name is {name!r}; expected a word without slashes")
    model = files.load(path)
    example = model.example if isinstance(model, VisionTransformer) else None
    digest = weights_digest(to_network(model, example).network)
    for run in runs:
        if isinstance(run, CertificationRun) and run.settings["weights"] != digest:
            raise InputError(f"the run on {run.data!r} certified other weights than those of {str(path)!r}")
    shown = [run if isinstance(run, ShelvedRun) else ShelvedRun.of(run) for run in runs]
    notes = {_KEY: json.dumps([asdict(run) for run in shown])}
    target = files.SHELF / f"{name}.safetensors"
    size = file_size(path)
    if size > LIMIT:
        raise InputError(f"{str(path)!r} has {size:,} bytes; the shelf takes files of at most {LIMIT:,}")
    make_folder(files.SHELF)
    write_tensors(target, read_tensors(path), read_metadata(path) | notes)
    return read_shelved(target)


def read_shelved(name: Pathlike) -> Shelved:
    """What is known about a model on the shelf, or in a file that `holdfast train` wrote."""
    path = files.shelf_file(name) or Path(name)
    if not path.exists():
        names = ", ".join(sorted(file.stem for file in files.SHELF.glob("*.safetensors")))
        raise InputError(f"{str(name)!r} is neither a file nor a model on the shelf ({names or 'which is empty'})")
    notes = read_metadata(path)
    training = json.loads(notes.get("training", "{}"))
    kind, config = files.described(path)
    own = path.parent == files.SHELF or "name" not in training
    return Shelved(
        path.stem if own else Path(training["name"]).stem,
        kind.__name__,
        config,
        notes.get("seed", ""),
        notes.get("command", ""),
        training,
        tuple(ShelvedRun(**run) for run in json.loads(notes.get(_KEY, "[]"))),
    )
