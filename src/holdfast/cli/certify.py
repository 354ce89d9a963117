"""`certify`, `merge` and `verify`: robustness of a classifier on a data set."""

from __future__ import annotations

import math
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
from holdfast.certification.examples import GIVEN, Data, ranges, read_examples, tokenised
from holdfast.certification.lines import Header
from holdfast.cli.inputs import Html, Json, Seed, refuse_same, writable
from holdfast.cli.work import INTERRUPTED, emit_json, say_written
from holdfast.data import Dataset, load
from holdfast.errors import HoldfastError, InputError
from holdfast.executors import RayCluster
from holdfast.graph.onnx import OnnxModel
from holdfast.graph.perturbation import read_perturbation
from holdfast.models.loading import load_classifier, load_tokenizer
from holdfast.models.python_file import read_arguments
from holdfast.progress import telling
from holdfast.report.numbers import down
from holdfast.results import CertificationRun, Target
from holdfast.storage import write_text
from holdfast.vnnlib import decide, read_specification

Model = Annotated[
    str,
    typer.Argument(
        help="digits, a name on the shelf, a model file or folder, a name in the Hugging Face cache, timm:NAME, "
        "FILE.onnx, FILE.py:FUNCTION."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder with the data files; default: HOLDFAST_DATA.")]
Download = Annotated[bool, typer.Option("--download", help="Download missing files of the model.")]
Beside = Annotated[list[Path] | None, typer.Option(help="The file of another run, for the same page; may be repeated.")]
Weights = Annotated[Path | None, typer.Option(help="Safetensors with the weights, for FILE.py:FUNCTION.")]
Arguments = Annotated[
    list[str] | None, typer.Option("--arg", help="NAME=VALUE for that function; may be repeated.", metavar="NAME=VALUE")
]
_RADII = {"l2": "36/255,72/255,108/255", "linf": "1/255,2/255,8/255"}

BatchSize = Annotated[int, typer.Option(min=1, help="Inputs treated at once.")]


def certify(
    model: Model,
    data: Annotated[
        str | None, typer.Option(help="digits, digits-32, cifar10, svhn, sst2, or a safetensors file.")
    ] = None,
    vnnlib: Annotated[Path | None, typer.Option(help="Instead of --data: a VNN-LIB file to decide.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for --vnnlib.")] = 100.0,
    weights: Weights = None,
    arg: Arguments = None,
    radii: Annotated[
        str | None,
        typer.Option(
            help="Where accuracies are shown: numbers or fractions; default: --at, or 36/255,72/255,108/255; for linf "
            "1/255,2/255,8/255."
        ),
    ] = None,
    norm: Annotated[Literal["l2", "linf"], typer.Option(help="Norm of the perturbations.")] = "l2",
    clip: Annotated[str | None, typer.Option(help="Limits of every number of an input, as 0,1; for linf.")] = None,
    at: Annotated[str | None, typer.Option(help="Decide at these radii alone, which is faster.")] = None,
    seconds_per_input: Annotated[
        float | None, typer.Option(help="Time limit of each proof, and of each attack; the best so far counts.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the records; an interrupted run resumes from it.", callback=writable)
    ] = None,
    method: Annotated[str, typer.Option(help="The composition.")] = "best",
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Only proved radii certify.")] = "proved",
    attack: Annotated[bool, typer.Option(help="Also search for the smallest change of each answer.")] = False,
    perturb: Annotated[
        str | None,
        typer.Option(
            help="What moves: pixels, embeddings, word:3, words:1,4, layer:1, patch:TOP,LEFT,HEIGHT,WIDTH, "
            "mask:FILE, directions:FILE, brightness, contrast or colour."
        ),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean of each channel, if the model takes normalised images.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Standard deviation of each channel, likewise.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data; default: the held-out one.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first inputs, this many.")] = None,
    shard: Annotated[str, typer.Option(help="Do part i of N, as in 1/4; merge joins the files.")] = "1/1",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, default 1; with --cluster the most workers.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Run on a Ray cluster: auto, or the address of its head.", metavar="HOST:PORT")
    ] = None,
    gpus_per_task: Annotated[
        float, typer.Option(min=0, help="GPUs per worker of the cluster, which then computes on cuda.")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="Device to compute on, such as cuda.")] = "cpu",
    batch: Annotated[
        str, typer.Option(help="Inputs at once; auto: one on a CPU, as many as memory allows on a GPU.")
    ] = "auto",
    resume: Annotated[bool, typer.Option(help="Resume from --out, or start it afresh.")] = True,
    seed: Seed = 0,
    data_dir: DataDir = None,
    download: Download = False,
    html: Html = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="SHARE@RADIUS that must be certified, as 0.95@0.05, else status 1; may be repeated.", metavar="TARGET"
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Write the targets as JUnit XML to this file.", callback=writable)
    ] = None,
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
    decided = None if at is None else _read_numbers("--at", at)
    numbers = decided or read_radii(_RADII[norm]) if radii is None else read_radii(radii)
    part = _read_shard(shard)
    moved = None if perturb is None else read_perturbation(perturb)
    if (mean is None) != (std is None):
        raise InputError("one of --mean and --std was given; expected both, or neither")
    normalise = None if mean is None or std is None else (_read_numbers("--mean", mean), _read_numbers("--std", std))
    if gpus_per_task and cluster is None:
        raise InputError("--gpus-per-task was given without --cluster; expected both, or --device cuda")
    executor = None if cluster is None else RayCluster(cluster, workers, gpus_per_task)
    refuse_same(out, html, junit, keep=beside or ())
    targets = [_read_target(text) for text in target or ()]
    if junit is not None and not targets:
        raise InputError("--junit was given without --target; expected both")
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
            norm=norm,
            clip=None if clip is None else _read_clip(clip),
            at=decided,
            seconds_per_input=seconds_per_input,
            seed=seed,
            batch=_read_batch(batch),
            workers=workers,
            executor=executor,
            device="cuda" if gpus_per_task else device,
            shard=part,
            limit=limit,
            name=model,
            command=shlex.join(["holdfast", *sys.argv[1:]]),
            progress=told,
            crew=None if executor is None else told.show_workers,
        )
    _show("certify", run, as_json)  # before the pages, so that a full disk does not cost the table as well
    html = html if run.records else None
    if html is not None:
        run.to_html(html, *others, targets=targets)
    if junit is not None:
        run.to_junit(junit, *targets)
    if not as_json:
        say_written(out, html, junit)
    if run.failures:
        failed, reason = ranges(list(run.failures)), next(iter(run.failures.values()))
        typer.echo(
            f"holdfast: {len(run.failures)} of {told.planned} inputs failed ({failed}), the first of them by {reason}; "
            "the same command tries them again",
            err=True,
        )
        raise typer.Exit(1)
    if told.done < told.planned:
        rest = "without --out nothing is kept" if out is None else "the same command resumes from there"
        typer.echo(f"holdfast: interrupted; {told.done} of {told.planned} inputs are done; {rest}", err=True)
        raise typer.Exit(INTERRUPTED)
    missed = [wanted for wanted in targets if not run.meets(wanted)]
    for wanted in missed:
        typer.echo(
            f"holdfast: the target of {wanted} is missed: {100 * run.shown(wanted):.4g} % are certified", err=True
        )
    if missed:
        raise typer.Exit(1)


def merge(
    files: Annotated[list[Path], typer.Argument(help="The files of the shards.")],
    out: Annotated[Path, typer.Option(help="File for the whole run.", callback=writable)],
    html: Html = None,
    beside: Beside = None,
    data: Annotated[
        str | None, typer.Option(help="The data, to show inputs; default: the data that the files name.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Merge the files of shards; refuse records that disagree."""
    refuse_same(html, keep=[out, *files, *(beside or ())])
    run = certification.merge(files, out, None if html is None else _data_of(read(files[0]).header, data, data_dir))
    _show("merge", run, as_json)
    if html is not None:
        run.to_html(html, *(read(path).run() for path in beside or ()))
    if not as_json:
        say_written(out, html)
    if run.missing:
        typer.echo(f"holdfast: {len(run.missing)} inputs are missing: {ranges(run.missing)}", err=True)


def verify(
    file: Annotated[Path, typer.Argument(help="The file of a run.")],
    sample: Annotated[int, typer.Option(min=1, help="Number of records, drawn at random.")] = 20,
    everything: Annotated[bool, typer.Option("--all", help="Every record.")] = False,
    model: Annotated[str | None, typer.Option(help="The model, if it has moved since.")] = None,
    weights: Weights = None,
    arg: Arguments = None,
    data: Annotated[str | None, typer.Option(help="The data, if they have moved since.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of the sample, to repeat it; default: a fresh one.")
    ] = None,
    batch: BatchSize = 8,
    data_dir: DataDir = None,
    download: Download = False,
    as_json: Json = False,
) -> None:
    """Recompute records and test the perturbations, from the model alone: status 1 if something does not hold."""
    header = read(file).header
    if header.data == GIVEN and data is None:
        raise InputError(
            f"{file} was made from inputs given in Python; expected them as --data FILE.safetensors, and --model if "
            f"{header.model!r} cannot be loaded, or in Python holdfast.certification.verify(file, model, data)"
        )
    name = model or header.model
    classifier = _classifier(name, weights, arg, download)
    examples = _examples(name, classifier, load(data or header.data, header.split, data_dir), download)
    with telling(file.name) as told:
        verification = certification.verify(
            file,
            classifier,
            examples,
            sample=None if everything else sample,
            seed=seed,
            batch=batch,
            progress=told,
        )
    emit_json("verify", {"file": str(file), **vars(verification)}, stdout=as_json, out=None)
    if not as_json:
        console = Console()
        for failure in verification.failures:
            console.print(f"does not hold: {failure}", style="red", soft_wrap=True, markup=False)
        for line in _verdict(verification, name, f"{data or header.data} ({header.split})"):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    if not verification.sound:
        raise typer.Exit(1)


def _verdict(check: Verification, model: str, data: str) -> list[str]:
    """What was checked, what it covers, and what it does not."""
    shares = ", ".join(
        f"{down(100 * share)} % at {r:.6g}" for r, share in zip(check.radii, check.accuracy, strict=True)
    )
    drawn = "" if check.seed is None else f", drawn with seed {check.seed} (--seed {check.seed} repeats it)"
    weaker = f"; {len(check.weaker)} claim less than is proved here" if check.weaker else ""
    counts = f"{len(check.checked)} records and {check.witnesses} perturbations: {len(check.failures)} failures"
    return [
        counts + drawn + weaker,
        f"{model} on {data}, the first {check.inputs} of {check.available} inputs: the file claims {shares}",
        *(f"unchecked: {words}" for words in check.unchecked),
    ]


def _classifier(model: str, weights: Path | None, arg: list[str] | None, download: bool) -> nn.Module:
    return load_classifier(model, download=download, weights=weights, arguments=read_arguments(arg or []))


def _decide(model: nn.Module, vnnlib: Path, timeout: float, out: Path | None, seed: int, as_json: bool) -> None:
    """Says whether the model meets the specification, in the competition's words."""
    if not isinstance(model, OnnxModel):
        raise InputError("--vnnlib was given for a model that is not an ONNX file; expected FILE.onnx")
    decision = decide(model, read_specification(vnnlib), timeout=timeout, seed=seed)
    if out is not None:
        write_text(out, decision.to_text())
    point = {name: None if t is None else t.tolist() for name, t in (("x", decision.x), ("y", decision.y))}
    proof = {"parts": decision.parts, "losses": {k: lost for k, lost in decision.losses.items() if math.isfinite(lost)}}
    payload = {"vnnlib": str(vnnlib), "verdict": decision.verdict, "seconds": decision.seconds, **proof, **point}
    emit_json("certify", payload, stdout=as_json, out=None)
    if not as_json:
        typer.echo(decision.to_text() if out is None else f"{decision.verdict}\n", nl=False)
        if decision.parts > 1:
            typer.echo(f"holdfast: proved in {decision.parts} parts", err=True)
        say_written(out)


def read_radii(text: str) -> list[float]:
    """Radii from "36/255,0.5"."""
    return list(_read_numbers("--radii", text))


def _read_numbers(option: str, text: str, example: str = "0.1,36/255") -> tuple[float, ...]:
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InputError(f"{option} is {text!r}; expected numbers or fractions, such as {example}") from None


def _read_target(text: str) -> Target:
    share, at, radius = text.partition("@")
    try:
        return Target(float(Fraction(share)), float(Fraction(radius)))
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        reason = f" ({error})" if at and isinstance(error, InputError) else ""
        raise InputError(f"--target is {text!r}{reason}; expected SHARE@RADIUS, such as 0.95@0.05") from None


def _read_clip(text: str) -> tuple[float, float]:
    ends = _read_numbers("--clip", text, "0,1")
    if len(ends) != 2:
        raise InputError(f"--clip is {text!r}; expected two numbers, such as 0,1")
    return ends[0], ends[1]


def _read_batch(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--batch is {text!r}; expected auto, or a number from 1 on")
    return int(text)


def _read_shard(text: str) -> Shard:
    parts = re.fullmatch(r"(\d+)/(\d+)", text)
    if parts is None:
        raise InputError(f"--shard is {text!r}; expected a part and their number, such as 1/4")
    return Shard(int(parts[1]), int(parts[2]))


def _examples(name: str, model: nn.Module, data: Dataset, download: bool) -> Data:
    """The data; sentences as the tokenizer of a transformers model encodes them."""
    if data.texts is None or not type(model).__module__.startswith("transformers."):
        return data
    return tokenised(data, load_tokenizer(name, download=download))


def _data_of(header: Header, data: str | None, data_dir: Path | None) -> Data | None:
    """The data of a run, so that its inputs can be shown: as they are, or as the tokenizer of its model encodes them.

    None where none were named and those of the run cannot be found.
    """
    try:
        dataset = load(data or header.data, header.split, data_dir)
        if dataset.checksum == header.settings["data"] or dataset.texts is None:
            examples = read_examples(dataset)
        else:
            examples = tokenised(dataset, load_tokenizer(header.model))
    except HoldfastError:
        if data is not None:
            raise
        return None
    return examples if data is not None or examples.checksum == header.settings["data"] else None


def _show(command: str, run: CertificationRun, as_json: bool) -> None:
    emit_json(command, run.to_dict() | {"command": command}, stdout=as_json, out=None)
    if not as_json:
        console = Console()
        console.print(run.table())
        for note, count in run.left_out().items():
            line = f"{count} of {len(run.records)} input{'s' if len(run.records) > 1 else ''}: {note}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
