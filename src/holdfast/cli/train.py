"""`train`: a config becomes a model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn

from holdfast.certification import certify
from holdfast.cli.inputs import Json, ShardSize
from holdfast.cli.work import INTERRUPTED, emit_json, say_written
from holdfast.data import load as load_data
from holdfast.models.loading import load_classifier
from holdfast.progress import progress_bar, telling
from holdfast.results import CertificationRun
from holdfast.storage import parse_size
from holdfast.train.config import LARGEST_SEED, TrainingConfig, read_training
from holdfast.train.loop import train as run_training
from holdfast.train.outcome import TrainingProgress

_FEW, _PATIENCE = 5, 10.0  # inputs that are certified after training, and seconds for each


def train(
    config: Annotated[str, typer.Argument(help="A TOML file, or a name that `holdfast models` lists.")],
    out: Annotated[Path | None, typer.Option(help="Folder, created if missing; default: runs/NAME-seed-SEED.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="Seed, instead of the one in the config.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A saved model to start from, for fine-tuning.")] = None,
    resume: Annotated[bool, typer.Option(help="Resume from the checkpoint in the folder, or start afresh.")] = True,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cuda:1; default: what accelerate chooses.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data files; default: HOLDFAST_DATA.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="Time between checkpoints.")] = 60.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after this time; the next run resumes.")] = None,
    shard_size: ShardSize = None,
    as_json: Json = False,
) -> None:
    """Train a model that can be certified; the same command resumes an interrupted training."""
    chosen = read_training(config)
    chosen = chosen if seed is None else chosen.with_seed(seed)
    chosen = chosen if start is None else chosen.with_start(start)
    folder = out or Path("runs") / f"{Path(chosen.name).stem.replace(' ', '-')}-seed-{chosen.train.seed}"
    with progress_bar() as bar:
        bar.columns = (*bar.columns, TimeRemainingColumn(elapsed_when_finished=True))
        task = bar.add_task("starting", total=None)

        def tell(now: TrainingProgress) -> None:
            bar.update(task, description=_line(chosen, now), completed=now.step, total=now.steps)

        run = run_training(
            chosen,
            folder,
            resume=resume,
            device=device,
            data_dir=data_dir,
            checkpoint_seconds=checkpoint_seconds,
            seconds=seconds,
            shard_size=None if shard_size is None else parse_size(shard_size),
            command=shlex.join(["holdfast", *sys.argv[1:]]),
            progress=tell,
        )
    if not run.writes:
        return
    record = {
        "config": chosen.to_dict(),
        "folder": str(folder),
        "finished": run.finished,
        "seconds": run.seconds,
        "history": [vars(epoch) for epoch in run.history],
        "test": run.test,
    }
    proved = _prove(chosen, folder, str(run.test["split"]), data_dir) if run.test else None
    if proved is not None:
        record["proved"] = {"radius": chosen.train.radius, "inputs": len(proved.records), "certified": _kept(proved)}
    emit_json("train", record, stdout=as_json, out=None)
    if not run.finished:
        saved = (folder / "checkpoint.safetensors").exists()
        rest = f"the same command resumes from {folder}" if saved else "nothing was saved"
        if run.interrupted:
            typer.echo(f"holdfast: interrupted; {rest}", err=True)
            raise typer.Exit(INTERRUPTED)
        typer.echo(f"holdfast: {seconds:g} s are over at step {run.step} of {run.steps}; {rest}", err=True)
        return
    if not as_json:
        _show(chosen, run.test, run.seconds, proved)
        say_written(folder / "model.safetensors", folder / "checkpoint.safetensors", folder / "run.json")


def _line(config: TrainingConfig, now: TrainingProgress) -> str:
    text = f"loss {now.loss:.3f}"
    if now.last is not None:
        radius = config.train.radius
        text += f"  clean {100 * now.last.clean:.1f} %"
        text += f"  certified at {radius:.3g}, estimated: {100 * now.last.certified:.1f} %"
    return text


def _prove(config: TrainingConfig, folder: Path, split: str, data_dir: Path | None) -> CertificationRun:
    """A few inputs of the held-out split, certified: the estimate in training is no proof."""
    data, radius = load_data(config.data.name, split, data_dir), config.train.radius
    with telling("proving a few inputs") as told:
        return certify(
            load_classifier(str(folder / "model.safetensors")),
            data,
            radius,
            at=radius,
            seconds_per_input=_PATIENCE,
            limit=_FEW,
            progress=told,
        )


def _kept(run: CertificationRun) -> int:
    """How many inputs are right and proved to stay so."""
    return sum(record.correct and record.radius > 0 for record in run.records)


def _show(config: TrainingConfig, test: dict[str, object], seconds: float, proved: CertificationRun | None) -> None:
    console = Console(highlight=False)
    console.print(f"{config.name}: {seconds:.0f} s")
    if test:
        clean, certified, off = (100 * float(str(test[key])) for key in ("clean", "certified", "content_off"))
        console.print(
            f"{test['inputs']} inputs of {test['split']}: clean {clean:.1f} %, content off {off:.1f} %, "
            f"certified at {config.train.radius:.3g} {certified:.1f} % by the estimate in training, which is no proof",
            soft_wrap=True,
        )
    if proved is not None and proved.records:
        console.print(
            f"Proved at {config.train.radius:.3g}: {_kept(proved)} of the first {len(proved.records)} inputs, in at"
            f" most {_PATIENCE:.0f} s each; holdfast certify proves more",
            soft_wrap=True,
        )
