"""Models in a folder as on the hub, and model cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from holdfast.cli.app import load as load_command
from holdfast.errors import HoldfastError, InputError
from holdfast.models import DigitsViT, Transformer, VisionTransformer, config, load, load_digits_vit, save
from holdfast.models.card import card
from holdfast.models.hub import OnHub
from holdfast.models.shelf import Shelved, read_shelved, shelved
from holdfast.results import at_least, at_most

pytest.importorskip("huggingface_hub")


def models() -> dict[str, tuple[OnHub, torch.Tensor]]:
    torch.manual_seed(0)
    small = replace(config("digits-smooth"), depth=1, width=8, heads=2)
    return {
        "transformer": (Transformer(small), torch.rand(2, small.channels, small.side, small.side)),
        "vit": (VisionTransformer(8, 1, 4, 1, 8, 2, units=12, pool="mean", classes=3), torch.rand(2, 1, 8, 8)),
        "digits": (load_digits_vit(), torch.rand(2, 8, 8)),
    }


@pytest.mark.parametrize("name", ["transformer", "vit", "digits"])
def test_a_model_comes_back_from_a_folder(name: str, tmp_path: Path) -> None:
    model, inputs = models()[name]
    model.save_pretrained(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "README.md"} == {file.name for file in (tmp_path / "saved").iterdir()}
    readme = (tmp_path / "saved" / "README.md").read_text()
    assert f"from holdfast.models import {type(model).__name__}" in readme
    assert "license: apache-2.0" in readme
    assert "More Information Needed" not in readme
    again = type(model).from_pretrained(tmp_path / "saved")
    assert type(again) is type(model)
    assert not again.training
    with torch.no_grad():
        assert torch.equal(again(inputs), model.eval()(inputs))
    again.save_pretrained(tmp_path / "twice")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes()


def test_a_transformer_on_the_hub_is_a_file_of_this_package(tmp_path: Path) -> None:
    model, inputs = models()["transformer"]
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model.safetensors")(inputs), model(inputs))


def test_weights_are_safetensors_alone(tmp_path: Path) -> None:
    model, _ = models()["vit"]
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HoldfastError, match=r"model\.safetensors"):
        VisionTransformer.from_pretrained(tmp_path)


def test_a_config_that_does_not_fit(tmp_path: Path) -> None:
    model, _ = models()["digits"]
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, "depth": 1}))
    with pytest.raises(InputError, match=r"the tensors do not fit config\.json"):
        DigitsViT.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="does not describe a VisionTransformer"):
        VisionTransformer.from_pretrained(tmp_path)


# -- cards


@pytest.mark.parametrize("model", shelved(), ids=lambda model: model.name)
def test_a_card_says_what_is_proved_of_a_model(model: Shelved) -> None:
    text, (run,) = card(model), model.certified
    assert text.startswith("---\nlicense: apache-2.0\n")
    for part in ("Use", "What is proved", "Data", "Recipe", "Licence"):
        assert f"\n## {part}\n" in text
    for radius, share in run.accuracy.items():
        assert f"| {radius} | {at_least(share)} % |" in text
    for share in run.attacked.values():
        assert f" | {at_most(share)} % |" in text
    assert f"{run.inputs:,} inputs of {run.data}, {at_least(run.clean)} % of them answered rightly" in text
    assert model.command in text
    assert run.command in text
    assert f"- {run.data}" in text
    assert f"--limit 10 --method {run.method} --at {','.join(run.accuracy)}\n" in text


def test_a_card_of_a_model_of_which_nothing_is_known(tmp_path: Path) -> None:
    model, _ = models()["transformer"]
    model.save_pretrained(tmp_path)
    text = card(read_shelved(tmp_path / "model.safetensors"))
    assert "Nothing was certified for these weights." in text
    assert "Not recorded." in text


def test_the_command_writes_a_card(tmp_path: Path) -> None:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(load_command("models"), ["card", *arguments])

    assert call("sst2-best", "--out", str(tmp_path / "README.md")).exit_code == 0
    shown = call("sst2-best")
    assert shown.exit_code == 0
    assert shown.output == (tmp_path / "README.md").read_text()
    assert "no change of the embeddings of all words" in shown.output
    assert "'no-such-model' is neither a file nor a model on the shelf (cifar10-best" in str(
        call("no-such-model").exception
    )


def test_a_card_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    save(load("cifar10-best"), file, {"training": json.dumps({"name": "mine/run.toml", "config": {"data": "cifar10"}})})
    shown = CliRunner().invoke(load_command("models"), ["card", file]).output
    assert "# run\n" in shown
    assert f'holdfast.models.load("{file}")' in shown
    assert f"holdfast certify {file} --data" in shown
    assert "Trained on cifar10." in shown


def test_the_shelf_says_of_how_many_inputs_a_number_is() -> None:
    shown = CliRunner().invoke(load_command("models"), [], env={"COLUMNS": "100"}).output
    (model,) = (each for each in shelved() if each.name == "cifar10-best")
    test, (run,) = model.training["test"], model.certified
    assert f"{run.inputs} of" in shown
    assert f"{at_least(test['content_off'])} instead of {at_least(test['clean'])}" in shown
    assert f"of {test['inputs']} inputs" in shown
