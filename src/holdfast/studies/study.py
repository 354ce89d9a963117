"""A study: parameters in, records through a resumable file, then tables and figures from one JSON file of numbers.

A study says which parts of work its parameters call for and measures one of them at a time. Everything else is here:
what is finished is in a file of JSON lines and is not done again, a file made with other settings is refused, and the
numbers are written whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, final

from matplotlib.figure import Figure
from rich.table import Table

from holdfast.errors import HoldfastError, InputError
from holdfast.registry import Registry
from holdfast.studies.processes import Tell

P = TypeVar("P")
S = TypeVar("S", bound="type[Study[Any]]")


def option(default: Any, text: str, *, grid: bool = False, argument: bool = False, least: float | None = None) -> Any:
    """A field of a study's parameters.

    Args:
        default: its value.
        text: what it is, for the command line.
        grid: whether it only says which parts are asked for; the others are settings that every record depends on.
        argument: whether the command line takes it without a name.
        least: the smallest number that is allowed, for each where there are several.
    """
    return field(default=default, metadata={"text": text, "grid": grid, "argument": argument, "least": least})


def check_least(parameters: Any) -> None:
    """Refuses numbers that are smaller than their option allows."""
    for f in fields(parameters):
        least, value = f.metadata["least"], getattr(parameters, f.name)
        for number in value if isinstance(value, tuple) else (value,):
            if least is not None and number is not None and number < least:
                raise InputError(f"--{f.name.replace('_', '-')} has {number}; expected at least {least:g}")


def settings(parameters: Any) -> dict[str, Any]:
    """What every record depends on, by name."""
    return {f.name: getattr(parameters, f.name) for f in fields(parameters) if not _is_grid(f)}


def _is_grid(f: Field[Any]) -> bool:
    return bool(f.metadata.get("grid"))


@final
@dataclass(frozen=True)
class Workplace:
    """Where a study works; the numbers do not depend on it.

    Attributes:
        runs: folder of trained models and whatever else is kept between commands.
        data_dir: folder with the data; None for HOLDFAST_DATA.
        device: such as "cuda".
        command: the command line, where there is one.
    """

    runs: Path = Path("runs")
    data_dir: Path | None = None
    device: str = "cpu"
    command: str = ""


@final
@dataclass(frozen=True)
class StudyPart:
    """One unit of work, small enough that losing it does not hurt.

    Attributes:
        kind: of its record; one of the study's `kinds`.
        key: what it is called, on the terminal and in the file; no two parts of a study share it.
        work: what `measure` needs to know about it.
    """

    kind: str
    key: str
    work: Any = None


@final
@dataclass(frozen=True)
class StudyPlan:
    """What the parameters call for.

    Attributes:
        stages: parts that may be done side by side; a later stage sees the records of those before it.
        left_out: what cannot be done here, with one line of reason each.
    """

    stages: Sequence[Sequence[StudyPart]]
    left_out: Sequence[str] = ()

    @property
    def parts(self) -> list[StudyPart]:
        """All parts, stage after stage."""
        return [part for stage in self.stages for part in stage]


class Records(Mapping[str, Any]):
    """The records of a study by the key of their part, and by kind."""

    def __init__(self, entries: Mapping[str, tuple[str, Any]]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key][1]

    def __iter__(self) -> Any:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, kind: str) -> list[Any]:
        """The records of one kind, in order."""
        return [record for own, record in self._entries.values() if own == kind]

    def kind(self, key: str) -> str:
        """The kind of a part's record."""
        return self._entries[key][0]


@final
@dataclass(frozen=True)
class StudyOutput:
    """What is made from the records.

    Attributes:
        summary: numbers that follow from them, ready for JSON.
        tables: for the terminal.
        figures: by what is added to the name of their files; "" for nothing.
        page: Markdown, where there is a table for a page.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    page: str | None = None


class Study(ABC, Generic[P]):
    """One figure or table, from a paper or our own.

    Attributes:
        name: of the command and of the files.
        title: one line.
        paper: the key of `docs/references.bib` whose claims it tests; "holdfast" for our own.
        minutes: that the whole of it takes on two cores, or on one H200 if the title says that it needs a GPU.
        memory: GiB at most, for one part of the work.
        parameters: a frozen dataclass whose fields are made by `option`.
        kinds: the dataclass of each kind of record.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    minutes: ClassVar[float]
    memory: ClassVar[float]
    parameters: ClassVar[type[Any]]
    kinds: ClassVar[Mapping[str, type[Any]]]

    @abstractmethod
    def quick(self) -> P:
        """Parameters of a quick run that takes less than a minute."""

    @abstractmethod
    def plan(self, parameters: P, place: Workplace) -> StudyPlan:
        """The parts to do; bad parameters are refused here, before any work."""

    @abstractmethod
    def measure(self, parameters: P, part: StudyPart, place: Workplace, earlier: Records, tell: Tell) -> Any:
        """The record of one part, an instance of the class of its kind; `earlier` are those of earlier stages."""

    @abstractmethod
    def show(self, parameters: P, records: Records) -> StudyOutput:
        """Tables and figures, from the records alone."""

    def stem(self, parameters: P) -> str:
        """Name of the files, where several sets of parameters have their own."""
        return self.name

    def same(self, part: StudyPart, record: Any) -> bool:
        """Whether a record of an earlier run was made as this part asks for; settings are compared before."""
        return True


#: All of them by name.
studies: Registry[type[Study[Any]]] = Registry("study", group="holdfast.studies")


def register_study(cls: S) -> S:
    """Decorator that adds a study to the registry."""
    for name in ("name", "title", "paper", "minutes", "memory", "parameters", "kinds"):
        if not hasattr(cls, name):
            raise HoldfastError(f"the study {cls.__name__} says no {name}; every study says it")
    for f in fields(cls.parameters):
        if f.default is MISSING or "text" not in f.metadata:
            raise HoldfastError(f"{f.name} of {cls.parameters.__name__} is no option; use option(default, text)")
    studies.add(cls.name)(cls)
    return cls
