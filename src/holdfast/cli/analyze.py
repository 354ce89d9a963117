"""`analyze`: every attention layer of a model, as a table, as JSON and as a page."""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from holdfast import analysis
from holdfast.analysis import Analysis, AnalysisProgress
from holdfast.bounds import bound_named
from holdfast.cli.inputs import Eps, Html, Json, Out, Seed, read_eps, refuse_same, writable
from holdfast.cli.work import INTERRUPTED, say_written
from holdfast.data.digits import SIDE, demo_digits
from holdfast.errors import InputError
from holdfast.models import load_digits_vit
from holdfast.models.digits import PATCH
from holdfast.models.loading import LoadedModel, Picture, load
from holdfast.progress import progress_bar
from holdfast.radii import check_radii
from holdfast.report.style import write_figure
from holdfast.storage import write_text


def analyze(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a file, a name in the Hugging Face cache, timm:NAME, minilm, smollm2."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text; repeat for several.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image file.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="A file of token ids: one line per input.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Take the bundled digits model, at test digits.")] = False,
    eps: Eps = "0.001,0.01,0.1",
    layers: Annotated[str | None, typer.Option(help="Which attention layers, such as 0,3-5. Default: all.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer texts to this many tokens.")] = None,
    method: Annotated[str, typer.Option(help="The bound.")] = "second-order",
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Guarantee of the bounds.")] = "numerical",
    proved_slope: Annotated[bool, typer.Option(help="Also prove the local constants from above.")] = False,
    attack: Annotated[bool, typer.Option(help="Also search for perturbations that move the output far.")] = True,
    seed: Seed = 0,
    download: Annotated[bool, typer.Option("--download", help="Download missing files of the model.")] = False,
    html: Html = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure to this file (PNG, SVG or PDF).", callback=writable)
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Analyze every attention layer of a model: local constants, bounds, attacks, heads, and sensitive tokens."""
    began = time.perf_counter()
    radii, chosen = check_radii(read_eps(eps)), _read_layers(layers)
    bound_named(method)  # like the options above: refused before a model is loaded
    refuse_same(html, plot, out)
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot is {str(plot)!r}; expected a name that ends in .png, .svg or .pdf")
    loaded = _load(model, text, image, tokens, demo, max_tokens, download)
    with progress_bar() as bar:
        task = bar.add_task("tracing", total=None)

        def show(now: AnalysisProgress) -> None:
            bar.update(task, description=now.name, completed=now.done, total=now.planned)

        result = analysis.analyze(
            loaded.model,
            loaded.inputs,
            radii,
            layers=chosen,
            method=method,
            guarantee=guarantee,
            proved_slope=proved_slope,
            attack=attack,
            tokens=loaded.tokens,
            pictures=None if loaded.picture is None else [loaded.picture],
            name=loaded.name,
            progress=show,
            seed=seed,
        )
    result = replace(
        result,
        notes=(f"About the weights: {loaded.note}.",) if loaded.note else (),
        command=shlex.join(["holdfast", *sys.argv[1:]]),
        seconds=time.perf_counter() - began,
    )
    if as_json:
        typer.echo(result.to_json())
    else:
        Console().print(result.table())
    _write(result, html, plot, out)  # after the table, so that a full disk does not cost that as well
    if not as_json:
        say_written(html, plot, out)
    if result.interrupted:
        typer.echo(f"holdfast: interrupted; {len(result.layers)} of {result.planned} layers were finished", err=True)
        raise typer.Exit(INTERRUPTED)


def _load(
    model: str | None,
    text: list[str] | None,
    image: Path | None,
    tokens: Path | None,
    demo: bool,
    max_tokens: int | None,
    download: bool,
) -> LoadedModel:
    """The model and the input that the command line names."""
    given = [name for name, value in (("--text", text), ("--image", image), ("--tokens", tokens)) if value]
    if demo:
        if model is not None or given:
            raise InputError(f"both --demo and {', '.join([model] if model else given)} were given; choose one")
        return _demo()
    if model is None:
        raise InputError("no model was given; name a folder, a file or a model, or --demo")
    if len(given) != 1:
        named = f"{' and '.join(given)} were" if given else "no input was"
        raise InputError(f"{named} given for {model!r}; expected one of --text, --image and --tokens")
    ids = None if tokens is None else _read_ids(tokens)
    return load(model, text=text, ids=ids, image=image, max_tokens=max_tokens, download=download)


def _read_ids(file: Path) -> list[list[int]]:
    """Token ids from the lines of a file."""
    try:
        rows = [[int(word) for word in line.split()] for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise InputError(f"--tokens {str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise InputError(
            f"--tokens {str(file)!r} holds something other than numbers; expected lines of token ids"
        ) from None
    rows = [row for row in rows if row]
    if not rows or len({len(row) for row in rows}) > 1:
        lengths = ", ".join(str(len(row)) for row in rows) or "no"
        raise InputError(f"--tokens {str(file)!r} has lines of {lengths} ids; expected lines of one length")
    return rows


def _demo() -> LoadedModel:
    """The bundled model at its first test digit."""
    images = demo_digits().images[:1]
    pixels = (images[0] * 255).round().to(torch.uint8).unsqueeze(-1).expand(SIDE, SIDE, 3)
    picture = Picture(pixels.contiguous(), grid=(SIDE // PATCH, SIDE // PATCH), prefix=1)
    return LoadedModel("digits ViT (bundled)", load_digits_vit(), images, picture=picture)


def _write(result: Analysis, html: Path | None, plot: Path | None, out: Path | None) -> None:
    if html is not None:
        result.to_html(html)
    if plot is not None:
        write_figure(result.plot(), plot, dpi=150)
    if out is not None:
        write_text(out, result.to_json() + "\n")


def _read_layers(text: str | None) -> list[int] | None:
    """Layers from "0,3-5"."""
    if text is None:
        return None
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.split(",")]
    if None in parts:
        raise InputError(f"--layers is {text!r}; expected numbers and ranges separated by commas, such as 0,3-5")
    return [i for part in parts if part for i in range(int(part[1]), int(part[2] or part[1]) + 1)]
