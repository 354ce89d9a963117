"""`repro cifar-vit` and `repro yudin-cifar10`: trainings, files of networks, what is refused, and both commands."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from holdfast import data as datasets
from holdfast.cli.app import app
from holdfast.data.dataset import Dataset
from holdfast.errors import InputError, SoundnessError
from holdfast.models import VisionTransformer, files, load
from holdfast.models.card import card
from holdfast.models.shelf import read_shelved
from holdfast.studies import StudyRun, Workplace, cifar_training, cifar_vit, yudin_cifar
from holdfast.studies.ascent import ascended
from holdfast.studies.cifar_training import CifarNetwork, CifarRecipe, CifarTraining, load_network, save_network, train
from holdfast.studies.cifar_vit import CifarVitParameters
from holdfast.studies.cifar_vit_shelf import put_network_on_shelf
from holdfast.studies.cifar_vit_summary import RADIUS, CifarContent, CifarImage, summed_up, withstood
from holdfast.studies.penalties import SpectralPenalty
from holdfast.studies.study import StudyPart
from holdfast.train.objective import ContentMeasurement

TINY = CifarTraining(patch=16, depth=1, width=8, heads=2, steps=3, batch=4)
KNOWN = CifarNetwork(TINY, 0.5, (0.4, 0.3, 0.2), 10, 4, 1.0, "cpu")
RESULTS = Path(__file__).parent.parent / "results"


def noise(count: int = 8) -> Dataset:
    images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return Dataset("noise", "all", images, torch.arange(count), torch.arange(count), "")


@pytest.mark.parametrize("recipe", get_args(CifarRecipe))
def test_every_recipe_depends_on_its_seed_alone_and_changes_all_weights(recipe: CifarRecipe) -> None:
    setting = replace(TINY, recipe=recipe, radius=0.0 if recipe in ("plain", "spectral") else 0.25, weight=0.1)
    state = torch.get_rng_state()
    first, again = train(setting, noise()).state_dict(), train(setting, noise()).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(setting.seed)
    begun = setting.network().state_dict()
    torch.set_rng_state(state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    still = [name for name in first if torch.equal(first[name], begun[name])]
    assert not [name for name in still if "in_proj_bias" not in name], "not trained"


def test_penalties_make_small_what_they_charge() -> None:
    """Forty steps: the movement along δ, and the norms of matrices, are below those without a penalty."""
    setting = replace(TINY, steps=40, rate=1e-2)
    spectral = replace(setting, recipe="spectral", weight=1.0)
    norms = [float(SpectralPenalty(train(one, noise()), 1.0)()) for one in (setting, spectral)]
    assert norms[1] < 0.7 * norms[0]
    free, charged = (replace(setting, recipe="lipschitz", weight=weight) for weight in (0.0, 10.0))
    x = noise().inputs
    delta = 0.25 * torch.ones_like(x) / x[0].numel() ** 0.5
    moved = [float(cifar_training._movement(train(one, noise()), x, delta)[1]) for one in (free, charged)]
    assert moved[1] < 0.7 * moved[0]


def test_adversarial_points_are_in_the_ball_and_raise_the_loss() -> None:
    model, data = train(replace(TINY, steps=30), noise()), noise()
    moved = ascended(model, data.inputs, data.labels, 0.5, 5)
    assert float((moved - data.inputs).flatten(1).norm(dim=1).max()) <= 0.5 * (1 + 1e-5)
    loss = torch.nn.functional.cross_entropy
    assert loss(model(moved), data.labels) > loss(model(data.inputs), data.labels)
    inside = ascended(model, data.inputs, data.labels, 0.5, 5, box=(0.0, 1.0))
    assert moved.min() < 0 == inside.min()
    assert moved.max() > 1 == inside.max()
    assert float((inside - data.inputs).flatten(1).norm(dim=1).max()) <= 0.5 * (1 + 1e-5)


def test_a_network_comes_back_from_its_file(tmp_path: Path) -> None:
    model, found = cifar_training.train_and_measure(TINY, noise(), noise(), attacked_images=4)
    assert found.images == 8
    assert found.attacked_images == 4
    save_network(tmp_path / "a.safetensors", model, found)
    again, known = load_network(tmp_path / "a.safetensors")
    assert known == found
    assert torch.equal(again(noise().inputs), model(noise().inputs))


@pytest.mark.parametrize("change", [{"recipe": "robust"}, {"steps": 0}, {"width": -1}])
def test_bad_trainings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        replace(TINY, **change)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_network(path, VisionTransformer(32, 3, 16, 2, 8, 2), KNOWN)  # two layers, and the file says one
    with pytest.raises(InputError, match="no network of this study"):
        load_network(path)
    result = CliRunner().invoke(
        app, ["repro", "cifar-vit", "--networks", str(tmp_path / "none"), "--out", str(tmp_path)]
    )
    assert result.exit_code != 0


def test_a_radius_beyond_the_attack_is_refused_and_summaries_count_all_images() -> None:
    one = CifarImage("a", KNOWN, 0, True, 1.0, 0.2, 0.4, {"first order": 3.0, "kinks": 1.0}, 2.0, 1.0)
    with pytest.raises(SoundnessError, match=r"proves 0\.5 for image 0 of a"):
        replace(one, radius=0.5)
    other = replace(one, place=1, radius=0.1, attack=0.2, losses={"first order": 1.0})
    row = summed_up("a", [one, other, CifarImage("a", KNOWN, 2, False)])
    assert (row.images, row.right, row.proved, row.attack) == (3, 2, pytest.approx(0.15), pytest.approx(0.3))
    assert row.ratio == pytest.approx(0.5)
    assert row.certified == pytest.approx(1 / 3)  # 0.2 is more than 36/255, 0.1 is not
    assert row.withstood == pytest.approx(2 / 3)
    assert summed_up("a", [replace(one, decided=True)]).proved is None
    assert row.losses == {"first order": pytest.approx(0.875), "kinks": pytest.approx(0.125)}


def test_the_command_proves_a_radius_and_says_what_limits_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["repro", "cifar-vit", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads((tmp_path / "cifar-vit-quick.json").read_text())["records"]
    assert row["numbers"]["radius"] > 0
    assert row["numbers"]["losses"]
    assert (tmp_path / "cifar-vit-quick.svg").exists()
    assert CliRunner().invoke(app, ["repro", "cifar-vit", "--quick", "--decide", "--out", str(tmp_path)]).exit_code == 0
    (row,) = json.loads((tmp_path / "cifar-vit-decided-quick.json").read_text())["records"]
    assert row["numbers"]["decided"]
    assert row["numbers"]["radius"] in (0.0, 36 / 255)


def test_the_stored_table_is_what_its_numbers_say(tmp_path: Path) -> None:
    """`yudin-cifar10` is drawn again from the stored records alone."""
    shutil.copy(RESULTS / "yudin-cifar10.json", tmp_path)
    result = CliRunner().invoke(app, ["repro", "yudin-cifar10", "--redraw", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "yudin-cifar10.md").read_text() == (RESULTS / "yudin-cifar10.md").read_text()
    rows = json.loads((tmp_path / "yudin-cifar10.json").read_text())["summary"]["trainings"]
    assert len(rows) == 9
    assert all(row["seeds"] == 3 for row in rows)


def test_the_stored_networks_say_how_they_were_trained() -> None:
    files = sorted((RESULTS / "cifar-vits").glob("*.safetensors"))
    assert {load_network(path)[1].training.recipe for path in files} == {"plain", "pgd", "lipschitz"}
    assert cifar_training.RADII[0] == RADIUS


def stored_images() -> list[CifarImage]:
    run = StudyRun("cifar-vit", CifarVitParameters(decide=True), RESULTS, Workplace())
    return [one for one in run.read().of("image") if one.network == "lipschitz-2-0.3"]


def test_the_network_on_the_shelf_is_that_of_the_study() -> None:
    file = files.shelf_file("cifar10-vit")
    assert file is not None
    assert file.samefile(RESULTS / "cifar-vits" / "lipschitz-2-0.3.safetensors")
    model, known = load_network(file)
    assert torch.equal(load("cifar10-vit")(noise().inputs), model(noise().inputs))
    images = stored_images()
    assert {one.known for one in images} == {known}
    (run,) = read_shelved("cifar10-vit").certified
    assert (run.inputs, run.clean) == (len(images), sum(one.right for one in images) / len(images))
    assert run.accuracy == {"0.141176": sum(one.radius >= RADIUS for one in images) / len(images)}
    assert run.attacked == {"0.141176": withstood(images, RADIUS)}


@pytest.mark.skipif(not (datasets.data_folder() / "cifar-10-batches-bin").exists(), reason="no CIFAR-10 at hand")
def test_its_margins_are_those_that_were_proved() -> None:
    images, test = stored_images(), datasets.load("cifar10")
    logits = load("cifar10-vit").double()(test.inputs[: len(images)].double())
    own = test.labels[: len(images), None]
    leads = (logits.gather(1, own) - logits).scatter(1, own, torch.inf).amin(1).tolist()
    assert [lead > 0 for lead in leads] == [one.right for one in images]
    assert max(abs(lead - one.margin) for lead, one in zip(leads, images, strict=True) if one.right) < 1e-6


def test_a_network_goes_onto_the_shelf_with_what_was_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHELF", tmp_path / "shelf")
    model, path, numbers = train(TINY, noise()), tmp_path / "tiny.safetensors", tmp_path / "cifar-vit-decided.json"
    save_network(path, model, KNOWN)
    one = CifarImage("tiny", KNOWN, 0, True, 1.0, RADIUS, 0.4, decided=True)
    images = [one, replace(one, place=1, radius=0.0), replace(one, place=2, radius=0.0, attack=0.1)]
    images += [replace(one, place=3, right=False, radius=0.0, attack=None)]

    def write(kept: list[CifarImage], content: bool) -> None:
        use = CifarContent("tiny", 10, 0.5, ContentMeasurement(0.4, [0.1], [2.0]))
        records: list[tuple[str, Any]] = [("image", each) for each in kept] + [("content", use)] * content
        run = StudyRun("cifar-vit", CifarVitParameters(decide=True), tmp_path, Workplace(command="holdfast repro"))
        numbers.unlink(missing_ok=True)
        run.journal.unlink(missing_ok=True)
        run.begin()
        monkeypatch.setattr(cifar_vit.CifarVitStudy, "measure", lambda *given: next(left))
        left = iter([record for _, record in records])
        for place, (kind, _) in enumerate(records):
            run.measure(StudyPart(kind, str(place)), lambda share: None)
        run.show()

    def add(*certified: str) -> str:
        result = CliRunner().invoke(app, ["models", "add", "mine", str(path), *certified])
        return result.output if result.exit_code == 0 else str(result.exception)

    assert "expected one --certified" in add()
    for kept, content, complaint in ((images[1:], True, "has gaps"), (images, False, "has no images and content")):
        write(kept, content)
        assert complaint in add("--certified", str(numbers))
    write(images, content=True)
    assert "mine" in add("--certified", str(numbers))
    halved, _ = load_network(path)
    assert torch.equal(load("mine")(noise().inputs), halved(noise().inputs))
    shelved = read_shelved("mine")
    (run,) = shelved.certified
    assert (run.inputs, run.clean, run.accuracy, run.attacked) == (4, 0.75, {"0.141176": 0.25}, {"0.141176": 0.5})
    text = card(shelved)
    assert "4 inputs of cifar10, 75.0 % of them answered rightly; by `forms`" in text
    assert "no layer limited in any way" in text
    assert "Of all 10 inputs of the split `test` 50.0 % are answered rightly, and 40.0 %" in text
    assert "examples/train_cifar_vits.py plain tiny.safetensors --patch 16 --depth 1 --width 8" in text
    assert put_network_on_shelf("again", files.SHELF / "mine.safetensors", numbers).certified == (run,)


def test_a_network_is_trained_once_and_its_nearest_changes_change_its_answers(tmp_path: Path) -> None:
    data = noise(6)
    known = yudin_cifar.trained(TINY, data, data, tmp_path, "cpu")
    assert known == yudin_cifar.trained(TINY, data, data, tmp_path, "cpu")  # its seconds are those of the file
    model = yudin_cifar.recorded_network(TINY, tmp_path, known)
    for folder, record in ((tmp_path, KNOWN), (tmp_path / "none", known)):
        with pytest.raises(InputError, match="the network whose training is recorded is not in"):
            yudin_cifar.recorded_network(TINY, folder, record)
    right = replace(data, labels=model(data.inputs).argmax(1))
    found = yudin_cifar.examined(model, TINY, right, "cpu")
    assert len(found.nearest) + found.not_found == len(right)
    assert len(found.attention.lipschitz) == TINY.depth
    assert all(1 - 1e-6 <= norm <= 5**0.5 for norm in found.attention.norm_p)  # 5 tokens
    (alone,), (row,) = (yudin_cifar.summary([KNOWN], beside) for beside in ([], [found]))
    assert alone["means"] == row["means"][:4] == [50.0, 40.0, 30.0, 20.0]
    assert row["means"][6] == max(found.attention.lipschitz)
    exact = torch.func.jacrev(lambda x: model(x[None])[0])(data.inputs[0]).reshape(10, -1)
    assert found.jacobian[0] == pytest.approx(float(torch.linalg.matrix_norm(exact, 2)), rel=1e-4)
    wrong = replace(right, labels=(right.labels + 1) % 10)
    assert yudin_cifar.examined(model, TINY, wrong, "cpu").nearest == []
