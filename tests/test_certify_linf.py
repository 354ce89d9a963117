"""L-infinity radii: boxes, clipped boxes, attacks in that norm, and files that know it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from certify_cases import labelled, linear_network
from holdfast import InputError
from holdfast.attacks.minimal import MinimalAttack
from holdfast.certification import certify, merge, read, verify
from holdfast.certification.settings import fingerprint
from holdfast.compositions import certify_inputs
from holdfast.compositions.forms import Margins
from holdfast.linalg.threat import Threat
from holdfast.network.network import Head, Network
from holdfast.results import CertificationRun
from relu_cases import images

LINF = Threat("linf")
CLIPPED = Threat("linf", (-1, 1))
ATTACK = MinimalAttack(restarts=2, steps=10)
NORMALISE = ((0.4,), (0.3,))


def exact(network: Network, x: Tensor, threat: Threat) -> Tensor:
    """Of a linear network: the least t with Σ_k |w_k| min(t, room_k) = margin, by hand, over all other classes."""
    w, logits = network.head.weight, network(x)
    least = []
    for point, own in zip(x.flatten(1), logits, strict=True):
        y, radii = int(own.argmax()), []
        for j in (j for j in range(len(own)) if j != int(own.argmax())):
            row, t = w[y] - w[j], torch.linspace(0, 2, 400_001, dtype=torch.float64)
            room = torch.full_like(point, torch.inf)
            if threat.clip is not None:
                room = torch.where(row > 0, point - threat.clip[0], threat.clip[1] - point)
            fall = (row.abs() * t[:, None].minimum(room)).sum(1)
            reached = fall >= own[y] - own[j]
            radii.append(float(t[reached.int().argmax()]) if bool(reached.any()) else torch.inf)
        least.append(min(radii))
    return torch.tensor(least, dtype=torch.float64)


@pytest.mark.parametrize("threat", [LINF, CLIPPED])
def test_linear_networks_are_exact_and_nothing_passes_the_truth(threat: Threat) -> None:
    network, x = linear_network(), labelled(6).inputs.double().clamp(-1, 1)
    truth = exact(network, x, threat)
    answers = network(x).argmax(-1)
    found = {
        method: torch.tensor([one.radius for one in certify_inputs(network, x, method=method, threat=threat)])
        for method in ("best", "forms", "gains")
    }
    for radius in found.values():
        assert bool((radius > 0).all() & (radius <= truth + 1e-5).all())
    assert bool((found["forms"] > 0.96 * truth).all())
    torch.testing.assert_close(found["best"], found["forms"], rtol=1e-6, atol=0)
    attacked = MinimalAttack()(network, x, answers, threat=threat)
    torch.testing.assert_close(attacked.radius, truth, rtol=1e-3, atol=2e-5)
    moved = x + attacked.perturbation.double()
    assert torch.equal(moved, threat.inside(moved))
    assert attacked.guarantee == "proved"


def test_clipping_only_helps_and_whole_boxes_end_at_their_width() -> None:
    network, x = linear_network(), labelled(6).inputs.double().clamp(-1, 1)
    for method in ("forms", "gains"):
        free, clipped = (
            [one.radius for one in certify_inputs(network, x, method=method, threat=threat)]
            for threat in (LINF, CLIPPED)
        )
        assert all(more >= less for more, less in zip(clipped, free, strict=True))
        assert max(more / less for more, less in zip(clipped, free, strict=True)) > 1.2
    narrow = Threat("linf", (0.0, 1e-3))
    inside = torch.full((1, 1, 6), 5e-4, dtype=torch.float64)
    steady = Network((), Head(network.head.weight, 9 * torch.eye(4, dtype=torch.float64)[0]), "steady")
    (one,) = certify_inputs(steady, inside, method="forms", threat=narrow)
    assert one.radius == pytest.approx(narrow.most)


@pytest.mark.parametrize("clip", [None, (0.0, 1.0)])
def test_no_attack_through_the_users_model_comes_nearer(clip: tuple[float, float] | None) -> None:
    """Signed descent on the model itself from corners: at the certified radius nothing changes, farther out it does."""
    model, data = images(2)
    run = certify(model, data, 0.01, attack=ATTACK, norm="linf", clip=clip, normalise=NORMALISE)
    through = certify(model, data, 0.01, method="gains", norm="linf", clip=clip, normalise=NORMALISE)
    assert {(r.method, r.through, r.norm) for r in run.records} == {("forms", None, "linf")}
    assert {(r.method, r.through) for r in through.records} == {("gains", "ball")}
    for (image, label), record, weaker in zip(data, run.records, through.records, strict=True):
        assert record.attack_radius is not None
        assert 0 < weaker.radius < record.radius < record.attack_radius < torch.inf
        assert not changes(model, image, label, record.radius, clip)
        assert changes(model, image, label, 1.1 * record.attack_radius, clip)  # the check can find one


def changes(model: nn.Module, image: Tensor, label: int, radius: float, clip: tuple[float, float] | None) -> bool:
    generator = torch.Generator().manual_seed(5)
    corners = torch.randn(24, *image.shape, generator=generator).sign()
    z = image + radius * corners
    for step in range(30):
        z = z.clamp(*(clip or (-9.0, 9.0))).detach().requires_grad_()
        logits = model((z - 0.4) / 0.3)
        if bool((logits.argmax(1) != label).any()):
            return True
        others = logits.scatter(1, torch.full((24, 1), label), -torch.inf)
        (slope,) = torch.autograd.grad((logits[:, label] - others.amax(1)).sum(), z)
        z = z.detach() - radius * (1 - step / 30) * slope.sign()
        z = image + (z - image).clamp(-radius, radius)
    return False


# -- files


def linear_run(path: Path | None, **options: Any) -> CertificationRun:
    given = {"attack": ATTACK, "norm": "linf", "clip": (-4, 4)} | options
    return certify(linear_network(), labelled(4), [0.05], out=path, **given)


def check(path: Path) -> tuple[str, ...]:
    return verify(path, linear_network(), labelled(4), sample=None).failures


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Edits the header and the third record, and signs the file again."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines[0], lines[3])
    lines[0]["fingerprint"] = fingerprint(lines[0]["settings"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_run_stands_goes_on_and_is_joined(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    found = linear_run(path)
    assert check(path) == ()
    assert (found.settings["norm"], found.settings["clip"]) == ("linf", "-4.0,4.0")
    assert found.perturbations == "l-infinity, clipped to -4, 4"
    before = path.read_bytes()
    assert linear_run(path).records == found.records
    assert path.read_bytes() == before
    with pytest.raises(InputError, match=r"norm linf against nothing, clip -4\.0,4\.0 against nothing"):
        linear_run(path, norm="l2", clip=None)
    assert merge([path, path]).records == found.records
    assert json.loads(before.splitlines()[1])["norm"] == "linf"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda header, row: row.update(radius=row["radius"] * 1.003), "radius .* against"),
        (lambda header, row: row.update(attack_radius=row["attack_radius"] * 0.999), "perturbation has norm"),
        (lambda header, row: row.update(through="ball"), "through 'ball' against None"),
        (lambda header, row: header["settings"].update(clip="-1.0,1.0"), "expected inputs within it"),
        (lambda header, row: row.pop("norm"), "a record in the norm l2 in another run"),
        (lambda header, row: row.update(losses={"luck": float("1e999")}), "is not a number|losses is"),
    ],
)
def test_forged_files_fail(tmp_path: Path, change: Callable[..., object], line: str) -> None:
    path = tmp_path / "run.jsonl"
    linear_run(path)
    forge(path, change)
    try:
        failures = " ".join(check(path))
    except InputError as error:
        failures = str(error)
    assert re.search(line, failures)


def test_files_without_the_new_words_are_read_and_gone_on_with(tmp_path: Path) -> None:
    """An l2 run writes what it always wrote but for losses, and a line without them is one of it."""
    path = tmp_path / "run.jsonl"
    options: dict[str, Any] = {"norm": "l2", "clip": None, "method": "forms"}
    linear_run(path, **options)
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    assert not {"norm", "clip", "at", "seconds"} & json.loads(header)["settings"].keys()
    rows = [json.loads(line) for line in lines]
    assert all(row.keys() & {"norm", "through", "unfinished"} == set() and row.pop("losses") for row in rows)
    path.write_text("\n".join([header, *map(json.dumps, rows[:3])]) + "\n", encoding="utf-8")
    assert len(linear_run(path, **options).records) == 4
    assert check(path) == ()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"norm": "l1"}, "norm is 'l1'; expected"),
        ({"norm": "l2"}, "clip is .* with the norm l2, whose balls are not clipped"),
        ({"clip": (1, 0)}, "expected the smaller number first"),
        ({"clip": (0, float("nan"))}, "expected two numbers"),
        ({"clip": (0, 1)}, r"the inputs hold numbers from .*, and clip is \(0.0, 1.0\); expected inputs within it"),
        ({"clip": None, "perturb": "brightness"}, "the norm is linf and brightness moves"),
        ({"perturb": ("word", 1)}, "clip is .* and perturb is word:1, whose numbers are changes"),
        ({"at": 0.0}, "at is 0.0; expected positive radii"),
        ({"seconds_per_input": 0.0}, "seconds_per_input is 0; expected a positive number"),
    ],
)
def test_bad_calls_get_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as error:
        linear_run(None, **options)
    assert "\n" not in str(error.value)


# -- at given radii, and in a given time


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_given_radii_are_decided_and_no_others(norm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"norm": norm, "clip": None, "attack": False, "method": "forms"}
    largest = [record.radius for record in linear_run(None, **options).records]
    at, asked = (0.05, 0.1, 0.2), []
    decide = Margins.decide
    monkeypatch.setattr(Margins, "decide", lambda forms, scale: asked.append(scale) or decide(forms, scale))
    path = tmp_path / "run.jsonl"
    found = linear_run(path, at=at, **options).records
    assert [record.radius for record in found] == [max([r for r in at if r <= most], default=0.0) for most in largest]
    assert 0 < len({record.radius for record in found} & set(at)) <= len(asked)
    assert len(asked) <= 4 * len(found)  # the last one for what was lost
    assert set(asked) <= set(at)
    assert check(path) == ()


def test_a_radius_with_a_time_limit_is_checked(tmp_path: Path) -> None:
    linear_run(tmp_path / "plenty.jsonl", seconds_per_input=60.0, attack=False)
    assert check(tmp_path / "plenty.jsonl") == ()
    forge(tmp_path / "plenty.jsonl", lambda _, row: row.update(radius=row["radius"] * 1.01))
    assert "against 0.0" in check(tmp_path / "plenty.jsonl")[0]


# -- what the margin was lost to


def test_losses_are_kept_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run = linear_run(path)
    assert [record.losses for record in read(path).run().records] == [record.losses for record in run.records]
    assert run.losses()["first order"] == pytest.approx(1, abs=0.02)
    page = _page(path, tmp_path)
    assert "What the margin was lost to" in page
    assert "first order 100.0 %" in page
    assert "beyond first order" in _page(tmp_path / "gains.jsonl", tmp_path, method="gains")


def _page(path: Path, folder: Path, **options: Any) -> str:
    run = read(path).run() if path.exists() else linear_run(path, **options)
    run.to_html(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")
