"""`repro smoothness`: local Lipschitz constants of language models against the length of their input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.inputs import Json
from holdfast.cli.work import Job, carry_out, emit_json
from holdfast.errors import HoldfastError, InputError, UnknownNameError
from holdfast.repro import smoothness as module
from holdfast.repro import smoothness_figure as figure
from holdfast.repro.texts import SOURCES, TEXTS, LanguageModel, load_source, read_text


def smoothness(
    models: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(SOURCES),
    lengths: Annotated[str, typer.Option(help="Numbers of tokens.")] = ",".join(map(str, module.LENGTHS)),
    sequences: Annotated[int, typer.Option(min=2, help="How many sequences of each length, at most.")] = 10,
    tokens: Annotated[int, typer.Option(min=1, help="Fewer (two at least) where they have more together.")] = 1280,
    alice: Annotated[Path | None, typer.Option(help="Alice in Wonderland; default: in HOLDFAST_DATA.")] = None,
    ag_news: Annotated[Path | None, typer.Option(help="AG News test set, .csv or .csv.gz.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="MiniLM, three lengths, two sequences.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for a JSON file and a figure of each model.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Local constants of attention layers against sequence length; finished parts of an earlier run are kept."""
    if quick:
        models, lengths, sequences = "minilm", "2,8,32", 2
    paths = {"alice": alice, "ag-news": ag_news}
    texts = {name: read_text(name, paths[name]) for name in TEXTS}
    wanted = module.settings(texts, read_lengths(lengths), sequences, tokens)
    stem = "smoothness-quick" if quick else "smoothness"
    records = [module.Record.read(name, out / f"{stem}-{name}.json") for name in _names(models)]
    shelf = _Shelf(texts)
    jobs = [job for record in records for job in _jobs(record, wanted, shelf)]
    done = carry_out(jobs)
    found = [record for record in records if record.of(wanted)]
    for record in found:
        figure.plot(record, wanted)
    for reason in shelf.absent.values():
        typer.echo(f"holdfast: left out: {reason}", err=True)
    emit_json("repro smoothness", {"models": [record.to_dict() for record in found]}, stdout=as_json, out=None)
    if not as_json:
        for record in found:
            Console().print(figure.table(record, wanted), f"Written: {record.path}, .png, .svg", sep="\n")
    done.exit(len(jobs))
    if not found:
        raise typer.Exit(2)


def read_lengths(text: str) -> list[int]:
    """Different numbers of tokens from "2,4,8"."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 2 for part in parts):
        raise InputError(f"--lengths is {text!r}; expected whole numbers from 2 on, separated by commas")
    return sorted({int(part) for part in parts})


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SOURCES:
            raise UnknownNameError("model", name, SOURCES)
    return names


class _Shelf:
    """Holds one model at a time, with its tokenised texts; remembers which ones cannot be had."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts
        self._held: tuple[str, LanguageModel, dict[str, list[int]]] | None = None
        self.absent: dict[str, str] = {}

    def use(self, name: str, work: Callable[[LanguageModel, dict[str, list[int]]], None]) -> None:
        """Does the work with a model and its token ids, unless the model cannot be had."""
        if name in self.absent:
            return
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one is loaded
            try:
                source = load_source(name)
            except HoldfastError as error:
                self.absent[name] = str(error)
                return
            self._held = (name, source, {text: source.tokenise(content) for text, content in self._texts.items()})
        work(*self._held[1:])


def _jobs(record: module.Record, wanted: list[module.Setting], shelf: _Shelf) -> list[Job[None]]:
    """The batches that are not finished, then the curves beside them."""

    def batch(setting: module.Setting) -> Job[None]:
        def work(source: LanguageModel, ids: dict[str, list[int]]) -> None:
            record.add(module.measure(source, ids[setting.text], setting))

        return Job(f"{record.name}: {setting.title}", lambda: shelf.use(record.name, work))

    def curves(source: LanguageModel, ids: dict[str, list[int]]) -> None:
        record.references = module.references(record.name, source, record.of(wanted))
        record.write()

    jobs = [batch(setting) for setting in wanted if setting not in record.cells]
    if jobs or record.references is None:
        jobs.append(Job(f"{record.name}: bound and configuration", lambda: shelf.use(record.name, curves)))
    return jobs
