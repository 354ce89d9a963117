"""`repro cifar-vit`: what can be proved about standard vision transformers on CIFAR-10, beside an attack.

A folder holds the networks, each a file that says how it was trained (`holdfast.studies.cifar_training`; the script
`examples/train_cifar_vits.py` makes more). Perturbations are l2 on pixels in [0, 1], all 3,072 of them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, final

import torch

from holdfast import data as datasets
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.data import Dataset
from holdfast.errors import InputError
from holdfast.graph import Readings, to_network
from holdfast.models.vit import VisionTransformer
from holdfast.studies.cifar_training import CifarNetwork, CifarTraining, load_network
from holdfast.studies.cifar_vit_summary import (
    RADIUS,
    CifarContent,
    CifarImage,
    by_network,
    draw_decided,
    draw_radii,
    page,
    radius_table,
    summed_up,
)
from holdfast.studies.losses import finite
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train.objective import measure_content
from holdfast.usage import peak_memory, processor_seconds

RANDOM = "random"  # instead of a folder: a small network that was not trained, and noise for an image
_ATTACK = MinimalAttack(restarts=2, targets=3)


@final
@dataclass(frozen=True)
class CifarVitParameters:
    """What `repro cifar-vit` takes."""

    networks: str = option("results/cifar-vits", "Folder with the networks, one of its files, or random.", grid=True)
    images: int = option(3, "Number of test images, the first ones.", grid=True, least=1)
    decide: bool = option(False, "Decide only at 36/255, which is quicker than finding the largest radius.", grid=True)
    method: str = option("forms", "The composition.")
    seconds: float = option(3600.0, "Time limit for the proof of an image.", least=0.001)


@lru_cache(maxsize=1)
def _subject(path: str) -> tuple[VisionTransformer, CifarNetwork, Readings]:
    if path == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            setting = CifarTraining(patch=16, depth=1, width=8, heads=2)
            model = setting.network().eval().requires_grad_(False)
        return model, CifarNetwork(setting, 0.0, (0.0, 0.0, 0.0), 0, 0, 0.0, "not trained"), Readings()
    return *load_network(Path(path)), Readings()


@lru_cache(maxsize=1)
def _test_images(data_dir: Path | None) -> Dataset:
    return datasets.load("cifar10", "test", data_dir)


def _content(path: str, place: Workplace) -> CifarContent:
    """What the network makes of content, on all test images."""
    model, test, device = _subject(path)[0], _test_images(place.data_dir), torch.device("cpu")
    right = torch.cat([model(x).argmax(1) for x in torch.split(test.inputs, 500)]) == test.labels
    return CifarContent(Path(path).stem, len(test), right.double().mean().item(), measure_content(model, test, device))


@final
@register_study
class CifarVitStudy(Study[CifarVitParameters]):
    """Standard vision transformers on CIFAR-10."""

    name = "cifar-vit"
    title = "Standard ViTs on CIFAR-10, trained plainly, with PGD and with a penalty: proved l2 radii and an attack"
    paper = "holdfast"
    minutes = 60
    memory = 8
    parameters = CifarVitParameters
    kinds: ClassVar = {"image": CifarImage, "content": CifarContent}

    def quick(self) -> CifarVitParameters:
        return CifarVitParameters(RANDOM, 1)

    def stem(self, parameters: CifarVitParameters) -> str:
        decided = "-decided" if parameters.decide else ""
        return self.name + decided + ("" if parameters.method == "forms" else f"-{parameters.method}")

    def plan(self, parameters: CifarVitParameters, place: Workplace) -> StudyPlan:
        compositions[parameters.method]  # an unknown name is refused here
        if parameters.networks == RANDOM:
            paths = [Path(RANDOM)]
        else:
            named = Path(parameters.networks)
            paths = [named] if named.is_file() else sorted(named.glob("*.safetensors"))
            _test_images(place.data_dir)
        if not paths:
            raise InputError(f"no network in {parameters.networks}; expected what examples/train_cifar_vits.py writes")
        images = range(parameters.images)
        used = [] if parameters.networks == RANDOM else paths
        content = [StudyPart("content", f"{p.stem}, content", str(p)) for p in used]
        proofs = [StudyPart("image", f"{p.stem}, image {i}", (str(p), i)) for i in images for p in paths]
        return StudyPlan([[*content, *proofs]])

    def measure(
        self, parameters: CifarVitParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> CifarImage | CifarContent:
        if part.kind == "content":
            return _content(part.work, place)
        path, i = part.work
        model, known, readings = _subject(path)
        if path == RANDOM:
            image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(i))
            label = model(image).argmax(1)
        else:
            test = _test_images(place.data_dir)
            image, label = test.inputs[i : i + 1], test.labels[i : i + 1]
        answer, name = model(image).argmax(1), Path(path).stem
        if not torch.equal(answer, label):
            return CifarImage(name, known, i, right=False)
        converted = to_network(model, image, readings=readings)
        x = converted.encode(image)
        used = processor_seconds()
        at = (RADIUS,) if parameters.decide else ()
        (certified,) = certify_inputs(converted.network, x, method=parameters.method, at=at, seconds=parameters.seconds)
        used, memory = processor_seconds() - used, peak_memory()
        tell(0.8)
        attack = _ATTACK(converted.network, x, answer).radius.item()
        return CifarImage(
            network=name,
            known=known,
            place=i,
            right=True,
            margin=certified.margin,
            radius=certified.radius,
            attack=attack if math.isfinite(attack) else None,
            decided=parameters.decide,
            losses=finite(certified.losses),
            seconds=certified.seconds,
            processor_seconds=used,
            unfinished=certified.unfinished,
            memory=memory,
        )

    def show(self, parameters: CifarVitParameters, records: Records) -> StudyOutput:
        groups = by_network(records.of("image"))
        use = {one.network: one for one in records.of("content")}
        rows = [summed_up(name, group, use.get(name)) for name, group in groups.items()]
        figure = draw_decided(groups) if parameters.decide else draw_radii(rows)
        return StudyOutput({"networks": [asdict(row) for row in rows]}, [radius_table(rows)], {"": figure}, page(rows))
