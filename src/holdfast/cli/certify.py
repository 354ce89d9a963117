"""`certify`, `merge` and `verify`: robustness of a classifier on a data set."""

from __future__ import annotations

import re
import shlex
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from torch import nn

from holdfast import certification
from holdfast.certification import Shard, Verification, read
from holdfast.certification.examples import Data, ranges, tokenised
from holdfast.cli.inputs import Json
from holdfast.cli.work import INTERRUPTED, emit_json, say_written, telling
from holdfast.data import Dataset, load
from holdfast.errors import InputError
from holdfast.graph.onnx import OnnxModel
from holdfast.graph.perturbation import read_perturbation
from holdfast.report.numbers import down
from holdfast.results import CertificationRun
from holdfast.storage import write_text
from holdfast.tracing.loading import load_classifier, load_tokenizer
from holdfast.tracing.python_file import read_arguments
from holdfast.vnnlib import decide, read_specification

Model = Annotated[
    str,
    typer.Argument(
        help="digits, a name on the shelf, a model file or folder, a name in the Hugging Face cache, timm:NAME, "
        "FILE.onnx, FILE.py:FUNCTION."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data files; default: HOLDFAST_DATA.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch files of the model that are missing.")]
Html = Annotated[Path | None, typer.Option(help="Write the page to this file.")]
Beside = Annotated[list[Path] | None, typer.Option(help="The file of another run, for the same page; repeat.")]
Weights = Annotated[Path | None, typer.Option(help="Safetensors with the weights, for FILE.py:FUNCTION.")]
Arguments = Annotated[
    list[str] | None, typer.Option("--arg", help="NAME=VALUE for that function; repeat.", metavar="NAME=VALUE")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Inputs that are treated at once.")]


def certify(
    model: Model,
    data: Annotated[
        str | None, typer.Option(help="digits, digits-32, cifar10, svhn, sst2, or a safetensors file.")
    ] = None,
    vnnlib: Annotated[Path | None, typer.Option(help="In the place of --data: a VNN-LIB file to decide.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for --vnnlib.")] = 100.0,
    weights: Weights = None,
    arg: Arguments = None,
    radii: Annotated[str, typer.Option(help="Radii or fractions, separated by commas.")] = "36/255,72/255,108/255",
    out: Annotated[Path | None, typer.Option(help="File for the records; an interrupted run goes on from it.")] = None,
    method: Annotated[str, typer.Option(help="The composition.")] = "best",
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Only proved radii certify.")] = "proved",
    attack: Annotated[bool, typer.Option(help="Also search the smallest change of each answer.")] = False,
    perturb: Annotated[
        str | None,
        typer.Option(
            help="What moves: pixels, embeddings, word:3, words:1,4, layer:1, patch:TOP,LEFT,HEIGHT,WIDTH, "
            "mask:FILE, directions:FILE, brightness, contrast or colour."
        ),
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Of each channel, where the model takes normalised images.")] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of each channel, likewise.")] = None,
    split: Annotated[str | None, typer.Option(help="Part of the data; default: the one that is held out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many inputs from the beginning.")] = None,
    shard: Annotated[str, typer.Option(help="Do part i of N, as 1/4; merge joins the files.")] = "1/1",
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    device: Annotated[str, typer.Option(help="Where to compute, such as cuda.")] = "cpu",
    batch: BatchSize = 8,
    resume: Annotated[bool, typer.Option(help="Go on with --out, or begin it anew.")] = True,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    data_dir: DataDir = None,
    download: Download = False,
    html: Html = None,
    beside: Beside = None,
    as_json: Json = False,
) -> None:
    """Prove for every input of a data set how far it can move before the answer changes; or decide a specification."""
    if (data is None) == (vnnlib is None):
        raise InputError("expected one of --data, for radii of a data set, and --vnnlib, for a specification")
    if vnnlib is not None:
        _decide(_classifier(model, weights, arg, download), vnnlib, timeout, out, seed, as_json)
        return
    assert data is not None
    numbers, part = read_radii(radii), _read_shard(shard)
    moved = None if perturb is None else read_perturbation(perturb)
    if (mean is None) != (std is None):
        raise InputError("one of --mean and --std was given; expected both, or neither")
    normalise = None if mean is None or std is None else (_read_numbers("--mean", mean), _read_numbers("--std", std))
    others = [read(path).run() for path in beside or ()]
    classifier = _classifier(model, weights, arg, download)
    examples = _examples(model, classifier, load(data, split, data_dir), download)
    with telling(model) as told:
        run = certification.certify(
            classifier,
            examples,
            numbers,
            method,
            attack,
            out,
            resume,
            guarantee=guarantee,
            perturb=moved,
            normalise=normalise,
            seed=seed,
            batch=batch,
            workers=workers,
            device=device,
            shard=part,
            limit=limit,
            name=model,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
            progress=told,
        )
    if html is not None and run.records:
        run.to_html(html, *others)
    _show("certify", run, as_json, out, html)
    if told.done < told.planned:
        rest = "without --out nothing is kept" if out is None else "the same command goes on from there"
        typer.echo(f"holdfast: interrupted; {told.done} of {told.planned} inputs are done; {rest}", err=True)
        raise typer.Exit(INTERRUPTED)


def merge(
    files: Annotated[list[Path], typer.Argument(help="The files of the shards.")],
    out: Annotated[Path, typer.Option(help="File for the whole run.")],
    html: Html = None,
    beside: Beside = None,
    as_json: Json = False,
) -> None:
    """Join the files of shards; refuse records that disagree."""
    run = certification.merge(files, out)
    if html is not None:
        run.to_html(html, *(read(path).run() for path in beside or ()))
    _show("merge", run, as_json, out, html)
    if run.missing:
        typer.echo(f"holdfast: {len(run.missing)} inputs are missing: {ranges(run.missing)}", err=True)


def verify(
    file: Annotated[Path, typer.Argument(help="The file of a run.")],
    sample: Annotated[int, typer.Option(min=1, help="How many records, drawn at random.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Every record.")] = False,
    model: Annotated[str | None, typer.Option(help="The model, where it has moved since.")] = None,
    weights: Weights = None,
    arg: Arguments = None,
    data: Annotated[str | None, typer.Option(help="The data, where they have moved since.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sample, to repeat it; default: a fresh one.")] = None,
    batch: BatchSize = 8,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Compute records again, and try the perturbations, from the model alone: status 1 if something does not hold."""
    header = read(file).header
    name = model or header.model
    classifier = _classifier(name, weights, arg, download)
    examples = _examples(name, classifier, load(data or header.data, header.split, data_dir), download)
    with telling(file.name) as told:
        found = certification.verify(
            file,
            classifier,
            examples,
            sample=None if everything else sample,
            seed=seed,
            batch=batch,
            progress=told,
        )
    emit_json("verify", {"file": str(file), **vars(found)}, stdout=as_json, out=None)
    if not as_json:
        console = Console()
        for failure in found.failures:
            console.print(f"does not hold: {failure}", style="red", soft_wrap=True, markup=False)
        for line in _verdict(found, name, f"{data or header.data} ({header.split})"):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    if not found.sound:
        raise typer.Exit(1)


def _verdict(found: Verification, model: str, data: str) -> list[str]:
    """What was checked, what it stands for, and what it does not."""
    shares = ", ".join(
        f"{down(100 * share)} % at {r:.6g}" for r, share in zip(found.radii, found.accuracy, strict=True)
    )
    drawn = "" if found.seed is None else f", drawn with seed {found.seed} (--seed {found.seed} repeats it)"
    weaker = f"; {len(found.weaker)} claim less than is proved here" if found.weaker else ""
    counts = f"{len(found.checked)} records and {found.witnesses} perturbations: {len(found.failures)} failures"
    return [
        counts + drawn + weaker,
        f"{model} on {data}, the first {found.inputs} of {found.available} inputs: the file claims {shares}",
        *(f"unchecked: {each}" for each in found.unchecked),
    ]


def _classifier(model: str, weights: Path | None, arg: list[str] | None, download: bool) -> nn.Module:
    return load_classifier(model, download=download, weights=weights, arguments=read_arguments(arg or []))


def _decide(model: nn.Module, vnnlib: Path, timeout: float, out: Path | None, seed: int, as_json: bool) -> None:
    """Says whether the model meets the specification, in the competition's words."""
    if not isinstance(model, OnnxModel):
        raise InputError("--vnnlib was given for a model that is no ONNX file; expected FILE.onnx")
    found = decide(model, read_specification(vnnlib), timeout=timeout, seed=seed)
    if out is not None:
        write_text(out, found.to_text())
    point = {name: None if t is None else t.tolist() for name, t in (("x", found.x), ("y", found.y))}
    payload = {"vnnlib": str(vnnlib), "verdict": found.verdict, "seconds": found.seconds, **point}
    emit_json("certify", payload, stdout=as_json, out=None)
    if not as_json:
        typer.echo(found.to_text() if out is None else f"{found.verdict}\n", nl=False)
        say_written(out)


def read_radii(text: str) -> list[float]:
    """Radii from "36/255,0.5"."""
    return list(_read_numbers("--radii", text))


def _read_numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InputError(f"{option} is {text!r}; expected numbers or fractions, such as 0.1,36/255") from None


def _read_shard(text: str) -> Shard:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None:
        raise InputError(f"--shard is {text!r}; expected a part and their number, such as 1/4")
    return Shard(int(found[1]), int(found[2]))


def _examples(name: str, model: nn.Module, data: Dataset, download: bool) -> Data:
    """The data; sentences as the tokenizer of a model of transformers encodes them."""
    if data.texts is None or not type(model).__module__.startswith("transformers."):
        return data
    return tokenised(data, load_tokenizer(name, download=download))


def _show(command: str, run: CertificationRun, as_json: bool, *written: Path | None) -> None:
    emit_json(command, run.to_dict() | {"command": command}, stdout=as_json, out=None)
    if not as_json:
        Console().print(run.table())
        say_written(*written)
