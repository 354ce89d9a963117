"""The files of a study: records as JSON lines while it runs, and one JSON file of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, final, get_args, get_origin, get_type_hints

from holdfast.certification.journal import complete, from_line, opened, to_line
from holdfast.certification.settings import fingerprint
from holdfast.certification.store import differences
from holdfast.errors import HoldfastError, InputError
from holdfast.report.style import paper_style, save_figure
from holdfast.storage import check_folder, make_folder, write_text
from holdfast.studies.processes import Tell
from holdfast.studies.study import (
    Records,
    Study,
    StudyOutput,
    StudyPart,
    StudyPlan,
    Workplace,
    check_least,
    settings,
    studies,
)
from holdfast.version import __version__

SCHEMA = "holdfast.study/1"


@final
@dataclass(frozen=True)
class StudyRun:
    """A study with its parameters, and where it works and writes; it can be sent to other processes.

    Attributes:
        name: of the study.
        parameters: an instance of its parameters.
        out: folder of the results.
        place: where it works.
        quick: whether its files say that they are of a try.
    """

    name: str
    parameters: Any
    out: Path
    place: Workplace
    quick: bool = False

    @property
    def study(self) -> Study[Any]:
        """The study."""
        return studies[self.name]()

    @property
    def stem(self) -> Path:
        """The files without their endings."""
        return self.out / f"{self.study.stem(self.parameters)}{'-quick' if self.quick else ''}"

    @property
    def journal(self) -> Path:
        """The file that grows while the study runs."""
        return self._file(".jsonl")

    @property
    def numbers(self) -> Path:
        """The file of numbers."""
        return self._file(".json")

    def _file(self, ending: str) -> Path:
        return self.stem.with_name(self.stem.name + ending)

    def stored_settings(self) -> dict[str, Any]:
        """Those of the file that holds the records, by name; none where there is no file."""
        stored = self._stored()
        if stored is None:
            return {}
        path, header, _ = stored
        try:
            return {name: json.loads(word) for name, word in header["settings"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise HoldfastError(f"{path} is damaged ({error}); move it away or give another --out") from None

    def plan(self) -> StudyPlan:
        """The parts to do."""
        check_least(self.parameters)
        plan = self.study.plan(self.parameters, self.place)
        keys = [part.key for part in plan.parts]
        if len(set(keys)) < len(keys):
            raise HoldfastError(f"{self.name} plans a part twice; please report")
        return plan

    def read(self) -> Records:
        """The finished records; those made with other settings are refused."""
        stored = self._stored()
        return Records({}) if stored is None else self._records(*stored)

    def _stored(self) -> tuple[Path, dict[str, Any], list[bytes]] | None:
        """The file that holds the records, its header, and the line of each: the journal, or the numbers alone."""
        lines = complete(self.journal.read_bytes()).splitlines() if self.journal.exists() else []
        if lines:
            return self.journal, _load(self.journal, lines[0]), lines[1:]
        if self.numbers.exists():
            content = _load(self.numbers, self.numbers.read_bytes())
            return self.numbers, content, [to_line(entry) for entry in content.get("records", ())]
        return None

    def begin(self) -> Records:
        """Opens the file of records, with what an earlier run has left; half a line at its end is cut off.

        The folders of the numbers and of the trained models are created if they are missing.
        """
        check_folder(self.out, self.journal.name, self.numbers.name)
        check_folder(self.place.runs)
        make_folder(self.out)
        finished = self.read()
        with opened(self.journal, wait=True) as journal:
            content = complete(self.journal.read_bytes())
            journal.cut(len(content))
            if not content:
                journal.append(to_line(self._header()))
                for key, record in finished.items():
                    journal.append(_entry(finished.kind(key), key, record))
        return finished

    def measure(self, part: StudyPart, tell: Tell) -> None:
        """Does one part; its record is on disk when this returns."""
        record = self.study.measure(self.parameters, part, self.place, self.read(), tell)
        line = _entry(part.kind, part.key, record)
        with opened(self.journal, wait=True) as journal:
            if part.key not in self.read():  # another run may have been quicker
                journal.append(line)

    def pending(self, parts: Sequence[StudyPart]) -> list[StudyPart]:
        """The parts that are not finished."""
        finished = self.read()
        for part in parts:
            if part.key in finished and not self.study.same(part, finished[part.key]):
                raise InputError(f"{self.stem}: {part.key} was made with other settings; give another --out")
        return [part for part in parts if part.key not in finished]

    def show(self, plan: StudyPlan | None = None) -> StudyOutput:
        """Writes the JSON file of numbers, in the order of a plan, and from that alone the figures and the page."""
        records = self.read()
        order = {part.key: place for place, part in enumerate(plan.parts if plan else ())}
        keys = sorted(records, key=lambda key: order.get(key, -1))
        stored = self._stored()
        began = self.place.command if stored is None else stored[1]["command"]  # not the one that draws again
        entries = [_fields(records.kind(key), key, records[key]) for key in keys]
        content = self._header() | {"command": began, "records": entries}
        with paper_style():
            shown = self.study.show(self.parameters, _typed(self.study, content["records"]))
            if shown.summary:
                content |= {"summary": shown.summary}
            write_text(self.numbers, _pretty(content))
            for suffix, figure in shown.figures.items():
                save_figure(figure, self.stem.with_name(self.stem.name + (f"-{suffix}" if suffix else "")))
        if shown.page is not None:
            write_text(self._file(".md"), shown.page)
        return shown

    def written(self, shown: StudyOutput) -> list[Path]:
        """The files of what was shown."""
        stems = [self.stem.with_name(self.stem.name + (f"-{suffix}" if suffix else "")) for suffix in shown.figures]
        drawn = [stem.with_name(stem.name + ending) for stem in stems for ending in (".png", ".svg")]
        return [self.numbers, *drawn, *([] if shown.page is None else [self._file(".md")])]

    def _header(self) -> dict[str, Any]:
        words = _words(self.parameters)
        return {
            "schema": SCHEMA,
            "study": self.name,
            "command": self.place.command,
            "holdfast": __version__,
            "settings": words,
            "fingerprint": fingerprint(words),
        }

    def _records(self, path: Path, header: Mapping[str, Any], lines: list[bytes]) -> Records:
        if header.get("schema") != SCHEMA or header.get("study") != self.name:
            raise HoldfastError(f"{path} is no result of {self.name}; move it away or give another --out")
        differing = differences(header["settings"], _words(self.parameters))
        if differing:
            raise InputError(f"{path} was made with other settings: {', '.join(differing)}; give another --out")
        try:
            return _typed(self.study, [from_line(line) for line in lines])
        except (ValueError, TypeError, KeyError) as error:
            raise HoldfastError(f"{path} is damaged ({error}); move it away or give another --out") from None


def read_numbers(study: Study[Any], path: Path) -> tuple[dict[str, Any], Records]:
    """The JSON file of numbers of a study, and its records."""
    content = _load(path, path.read_bytes())
    if content.get("schema") != SCHEMA or content.get("study") != study.name:
        raise InputError(f"{path} is no result of {study.name}; expected its JSON file of numbers")
    return content, _typed(study, content["records"])


def measure_part(work: tuple[StudyRun, StudyPart], tell: Tell) -> None:
    """Does one part, in whichever process."""
    run, part = work
    run.measure(part, tell)


def _words(parameters: Any) -> dict[str, str]:
    """The settings as texts, as the store of `certify` compares them."""
    return {name: json.dumps(value, default=str) for name, value in settings(parameters).items()}


def _fields(kind: str, key: str, record: Any) -> dict[str, Any]:
    return {"kind": kind, "part": key, "numbers": asdict(record)}


def _entry(kind: str, key: str, record: Any) -> bytes:
    return to_line(_fields(kind, key, record))


def _load(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return from_line(content)
    except ValueError as error:
        raise HoldfastError(f"{path} cannot be read ({error}); move it away or give another --out") from None


def _typed(study: Study[Any], entries: list[dict[str, Any]]) -> Records:
    """The records as instances of the study's classes, which check themselves."""
    read = {}
    for entry in entries:
        kind = entry["kind"]
        read[entry["part"]] = (kind, from_json(study.kinds[kind], entry["numbers"]))
    return Records(read)


def from_json(hint: Any, value: Any) -> Any:
    """The inverse of `dataclasses.asdict` for a type that is made of dataclasses, lists, tuples and dicts."""
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        unknown = value.keys() - hints.keys()
        if unknown:
            raise KeyError(f"{hint.__name__} has no {', '.join(sorted(unknown))}")
        return hint(**{name: from_json(hints[name], content) for name, content in value.items()})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        chosen = next((kind for kind in arguments if kind is not type(None)), Any)
        return None if value is None else from_json(chosen, value)
    if origin in (list, tuple):
        return origin(from_json(arguments[0], item) for item in value)
    if origin is dict:
        return {key: from_json(arguments[1], item) for key, item in value.items()}
    return float(value) if hint is float and isinstance(value, int) else value


def _pretty(content: Mapping[str, Any]) -> str:
    """JSON with a line for every record."""
    parts = []
    for key, value in content.items():
        rows = [json.dumps(row, allow_nan=False) for row in value] if key == "records" else None
        text = json.dumps(value, allow_nan=False) if rows is None else "[\n" + ",\n".join(rows) + "\n]"
        parts.append(f'"{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"
