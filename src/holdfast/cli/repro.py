"""`repro`: the tables and figures of the documentation, made again."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from holdfast.cli import images, lofast, smoothness, words
from holdfast.cli.inputs import Json, read_eps
from holdfast.cli.work import Job, carry_out, emit_json
from holdfast.repro import jasmin as jasmin_module
from holdfast.repro import lofast as lofast_module
from holdfast.repro import networks as networks_module
from holdfast.repro import tightness as module
from holdfast.repro import vit as vit_module
from holdfast.repro.vit_training import EPOCHS, Initialisation, Recipe, Setting
from holdfast.results import Guarantee

app = typer.Typer(help="Make the tables and figures of the documentation again.", no_args_is_help=True)
app.command("smoothness")(smoothness.smoothness)
app.command("words")(words.words)
app.command("images")(images.images)
for study in (lofast_module.FIGURE_2, lofast_module.FIGURE_5):
    app.command(study.name)(lofast.command_of(study))


@app.callback()
def _root() -> None:
    """Keeps the name of the figure a sub-command while there is only one."""


@app.command("tightness")
def tightness(
    shape: Annotated[str, typer.Option(help="Tokens, width and heads, separated by commas.")] = "64,64,8",
    seeds: Annotated[int, typer.Option(min=1, help="How many random layers for each regime.")] = 3,
    eps: Annotated[str, typer.Option(help="Radii, separated by commas.")] = ",".join(map(str, module.RADII)),
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Of the bounds.")] = "numerical",
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the figure.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Ratio of every bound to an attack, on random layers from flat to peaked attention."""
    n, d, h = (int(size) for size in read_eps(shape))
    radii = read_eps(eps)

    def job(regime: module.Regime, seed: int, kind: Guarantee) -> Job[module.Measurement]:
        return Job(f"{regime.title}, seed {seed}", lambda: module.measure(regime, seed, radii, kind, device))

    jobs = [job(regime, seed, guarantee) for regime in module.regimes(n, d, h) for seed in range(seeds)]
    done = carry_out(jobs)
    stem = out / f"tightness-n{n}-d{d}-h{h}-{guarantee}"
    payload = {"layers": [measurement.to_dict() for measurement in done.results]}
    emit_json("repro tightness", payload, stdout=as_json, out=stem.with_suffix(".json"))
    if done.results:
        module.plot(done.results, stem)
    if not as_json:
        Console().print(*module.tables(done.results), f"Written: {stem}.json, .png, .svg", sep="\n")
    done.exit(len(jobs))


@app.command("jasmin")
def jasmin(
    ks: Annotated[str, typer.Option(help="Values of k, separated by commas.")] = "0,2,10",
    weights: Annotated[str, typer.Option(help="Weights of the penalty, separated by commas.")] = "0.01,0.1,1",
    seeds: Annotated[int, typer.Option(min=1, help="How many trainings for each.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Of each training.")] = 60,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two epochs, one seed, one weight: a try of half a minute.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the figure.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """What the JaSMin penalty does to a small ViT on digits; finished trainings of an earlier run are kept."""
    chosen = [float(weight) for weight in read_eps(weights)]
    wanted = jasmin_module.settings(seeds, epochs, [int(k) for k in read_eps(ks)], chosen)
    if quick:
        wanted = jasmin_module.settings(1, 2, [int(k) for k in read_eps(ks)], chosen[:1])
    stem = out / ("jasmin-quick" if quick else "jasmin")
    path = stem.with_suffix(".json")
    cells = jasmin_module.finished(path)

    def job(setting: jasmin_module.Setting) -> Job[None]:
        def run() -> None:
            cells[setting] = jasmin_module.measure(setting)
            jasmin_module.write(path, cells.values())

        return Job(f"{setting.title}, seed {setting.seed}", run)

    jobs = [job(setting) for setting in wanted if setting not in cells]
    done = carry_out(jobs)
    found = [cells[setting] for setting in wanted if setting in cells]
    emit_json("repro jasmin", {"cells": [asdict(cell) for cell in found]}, stdout=as_json, out=None)
    if found:
        jasmin_module.plot(found, stem)
    if not as_json:
        Console().print(*jasmin_module.tables(found), f"Written: {stem}.json, .png, .svg", sep="\n")
    done.exit(len(jobs))


@app.command("networks")
def networks(
    layers: Annotated[str, typer.Option(help="Depths, separated by commas.")] = "2,4",
    weights: Annotated[str, typer.Option(help="Spectral norms of the weights, separated by commas.")] = "0.5,1,1.5,2",
    seeds: Annotated[int, typer.Option(min=1, help="How many random networks for each.")] = 3,
    inputs: Annotated[int, typer.Option(min=1, help="How many inputs for each network.")] = 4,
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Of the radii.")] = "proved",
    out: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Certified radius against attack radius on small random networks, for every composition."""
    depths, norms = [int(depth) for depth in read_eps(layers)], read_eps(weights)

    def job(setting: networks_module.Setting, kind: Guarantee) -> Job[networks_module.Measurement]:
        return Job(setting.title, lambda: networks_module.measure(setting, inputs, kind))

    jobs = [
        job(networks_module.Setting(depth, norm, seed), guarantee)
        for depth in depths
        for norm in norms
        for seed in range(seeds)
    ]
    done = carry_out(jobs)
    path = out / f"networks-{guarantee}.json"
    emit_json("repro networks", {"networks": [one.to_dict() for one in done.results]}, stdout=as_json, out=path)
    if not as_json and done.results:
        Console().print(networks_module.table(done.results), f"Written: {path}", sep="\n")
    done.exit(len(jobs))


@app.command("vit")
def vit(
    recipe: Annotated[Recipe, typer.Option(help="How to train: plain, or so that radii can be proved.")] = "plain",
    layers: Annotated[str, typer.Option(help="Depths, separated by commas.")] = "2,4",
    digits: Annotated[int, typer.Option(min=1, help="How many test digits to certify for each model.")] = 8,
    methods: Annotated[str, typer.Option(help="Compositions, separated by commas.")] = "telescoped",
    init: Annotated[Initialisation, typer.Option(help="Of the weights, with the plain recipe.")] = "huggingface",
    seed: Annotated[int, typer.Option(help="Of the training.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Of the training: 60 for plain, 100 for lipschitz.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the trained models.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Proved radius against attack radius on standard ViTs trained on digits; trained models are kept."""
    names = methods.split(",")
    length = epochs or EPOCHS[recipe]
    settings = [Setting(int(depth), recipe, init, seed, length) for depth in read_eps(layers)]
    trained = carry_out([Job(f"train {one.name}", partial(vit_module.prepare, one, digits, out)) for one in settings])
    trained.exit(len(settings))
    # Attacks come last: they take more memory than certificates, whose own use is part of the result.
    places = [(subject, i) for subject in trained.results for i in range(len(subject.places))]
    done = carry_out([Job(f"{s.setting.name}, digit {i}", partial(vit_module.certify, s, i, names)) for s, i in places])
    done.exit(len(places))
    attacks = carry_out([Job(f"attack {s.setting.name}", partial(vit_module.attack, s)) for s in trained.results])
    attacks.exit(len(settings))
    measured = []
    for subject, nearest in zip(trained.results, attacks.results, strict=True):
        rows = [row for (owner, _), row in zip(places, done.results, strict=True) if owner is subject]
        one = vit_module.Measurement(subject.setting, subject.accuracy, subject.training, rows, nearest)
        measured.append(one)
    path = out / f"vit-{settings[0].run}.json"
    emit_json("repro vit", {"models": [one.to_dict() for one in measured]}, stdout=as_json, out=path)
    if not as_json:
        Console().print(vit_module.table(measured), f"Written: {path}", sep="\n")
