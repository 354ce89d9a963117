"""Reads VNN-LIB: declarations of X_i and Y_j, and assertions that bound them.

The subset is that of the competition: every X_i has a lower and an upper bound, alone or within disjunctions, and the
Y_j obey linear inequalities joined by `and` and `or`. Numbers are taken as the nearest float64.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

import torch

from holdfast.errors import InputError
from holdfast.storage import Pathlike
from holdfast.vnnlib.specification import Box, OutputCase, Specification

_TOKEN = re.compile(r";[^\n]*|\n|[()]|[^\s();]+")
_VARIABLE = re.compile(r"([XY])_(\d+)")
_SILENT = {"set-logic", "set-info", "set-option", "check-sat", "get-model", "exit"}  # commands that state nothing
_MOST_CASES = 10_000


def read_specification(path: Pathlike) -> Specification:
    """The specification in a file, which may be compressed (.gz).

    Raises:
        InputError: the file is not there, or holds something that is not supported; the message names the line.

    Example:
        >>> read_specification("property.vnnlib.gz").outputs
        10
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())
        raise InputError(f"{name!r} cannot be read: {reason}; expected a VNN-LIB file, plain or .gz") from None
    return _VnnlibReader(name).read(text)


@final
@dataclass(frozen=True)
class _FileWord:
    text: str
    line: int


@final
@dataclass(frozen=True)
class _List:
    parts: tuple[_FileWord | _List, ...]
    line: int

    @property
    def head(self) -> str:
        return self.parts[0].text if self.parts and isinstance(self.parts[0], _FileWord) else ""


@final
@dataclass(frozen=True)
class _LinearTerm:
    """A sum of multiples of variables, and a number."""

    terms: dict[tuple[str, int], float]
    constant: float = 0.0

    def plus(self, other: _LinearTerm, factor: float = 1.0) -> _LinearTerm:
        terms = dict(self.terms)
        for variable, c in other.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor * c
        return _LinearTerm({v: c for v, c in terms.items() if c}, self.constant + factor * other.constant)


#: A disjunction of conjunctions of inequalities `linear <= 0`, each with its line.
_Clauses = list[list[tuple[_LinearTerm, int]]]


@final
class _VnnlibReader:
    """Reads one file; every message names it and the line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts = {"X": 0, "Y": 0}

    def _refuse(self, line: int, why: str) -> NoReturn:
        raise InputError(f"{self._name}, line {line}: {why}")

    def read(self, text: str) -> Specification:
        common: list[tuple[_LinearTerm, int]] = []
        choices: list[_Clauses] = []
        for form in self._forms(text):
            if not isinstance(form, _List):
                self._refuse(form.line, f"{form.text!r} stands alone; expected (declare-const …) or (assert …)")
            if form.head in ("declare-const", "declare-fun"):
                self._declare(form)
            elif form.head == "assert" and len(form.parts) == 2:
                clauses = self._clauses(form.parts[1])
                if len(clauses) == 1:
                    common += clauses[0]
                else:
                    choices.append(clauses)
            elif form.head not in _SILENT:
                self._refuse(
                    form.line,
                    f"{form.head or 'a list'!r} is not supported; expected declare-const, declare-fun, assert",
                )
        return self._specification(common, choices)

    # -- from text to lists

    def _forms(self, text: str) -> Iterator[_FileWord | _List]:
        line, open_lists = 1, list[tuple[list[_FileWord | _List], int]]()
        for token in _TOKEN.finditer(text):
            word = token[0]
            if word == "\n":
                line += 1
            elif word == "(":
                open_lists.append(([], line))
            elif word[0] != ";":
                form: _FileWord | _List = _FileWord(word, line)
                if word == ")":
                    if not open_lists:
                        self._refuse(line, "a bracket is closed that was not opened")
                    parts, begun = open_lists.pop()
                    form = _List(tuple(parts), begun)
                if open_lists:
                    open_lists[-1][0].append(form)
                else:
                    yield form
        if open_lists:
            self._refuse(open_lists[-1][1], "a bracket is opened that is never closed")

    # -- from lists to inequalities

    def _declare(self, form: _List) -> None:
        words = [part.text if isinstance(part, _FileWord) else "()" for part in form.parts[1:]]
        variable = _VARIABLE.fullmatch(words[0]) if words else None
        if variable is None or words[1:] not in (["Real"], ["()", "Real"]):
            self._refuse(
                form.line, f"({form.head} {' '.join(words)}) is not supported; expected X_i or Y_j of type Real"
            )
        kind, number = variable[1], int(variable[2])
        if number != self._counts[kind]:
            self._refuse(
                form.line, f"{words[0]} is declared; expected {kind}_{self._counts[kind]}, one after the other"
            )
        self._counts[kind] += 1

    def _clauses(self, form: _FileWord | _List) -> _Clauses:
        if isinstance(form, _List) and form.head in ("<=", ">=") and len(form.parts) == 3:
            left, right = (self._linear(part) for part in form.parts[1:])
            small, large = (left, right) if form.head == "<=" else (right, left)
            return [[(small.plus(large, -1.0), form.line)]]
        if isinstance(form, _List) and form.head == "or":
            return [clause for part in form.parts[1:] for clause in self._clauses(part)]
        if isinstance(form, _List) and form.head == "and":
            return self._product([self._clauses(part) for part in form.parts[1:]], form.line)
        shown = form.text if isinstance(form, _FileWord) else form.head or "a list"
        self._refuse(form.line, f"{shown!r} is not supported in an assertion; expected <=, >=, and, or")

    def _product(self, parts: Sequence[_Clauses], line: int) -> _Clauses:
        """All parts hold: one clause of each."""
        if math.prod(len(part) for part in parts) > _MOST_CASES:
            self._refuse(line, f"there are more than {_MOST_CASES} cases")
        return [list(itertools.chain(*chosen)) for chosen in itertools.product(*parts)]

    def _linear(self, form: _FileWord | _List) -> _LinearTerm:
        if isinstance(form, _FileWord):
            variable = _VARIABLE.fullmatch(form.text)
            if variable is None:
                return _LinearTerm({}, self._number(form))
            kind, number = variable[1], int(variable[2])
            if number >= self._counts[kind]:
                self._refuse(form.line, f"{form.text} was not declared")
            return _LinearTerm({(kind, number): 1.0})
        parts = [self._linear(part) for part in form.parts[1:]]
        if form.head in ("+", "-") and parts:
            sign = -1.0 if form.head == "-" else 1.0
            total = parts[0] if len(parts) > 1 or sign > 0 else _LinearTerm({}).plus(parts[0], sign)
            for part in parts[1:]:
                total = total.plus(part, sign)
            return total
        if form.head == "*" and len(parts) == 2 and not (parts[0].terms and parts[1].terms):
            factor, other = parts if not parts[0].terms else parts[::-1]
            return _LinearTerm({}).plus(other, factor.constant)
        self._refuse(
            form.line, f"{form.head or 'a list'!r} is not supported in a term; expected +, -, and * by a number"
        )

    def _number(self, word: _FileWord) -> float:
        try:
            number = float(word.text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self._refuse(word.line, f"{word.text!r} is neither X_i, nor Y_j, nor a number")
        return number

    # -- from inequalities to boxes

    def _specification(self, common: list[tuple[_LinearTerm, int]], choices: list[_Clauses]) -> Specification:
        if not self._counts["X"] or not self._counts["Y"]:
            self._refuse(1, "no X_i or no Y_j is declared; expected a VNN-LIB specification")
        cases_by_box: dict[tuple[tuple[int, bool, float], ...], list[OutputCase]] = {}
        for clause in self._product(choices, 1):
            bounds, outputs = self._parted([*common, *clause])
            cases_by_box.setdefault(bounds, []).append(outputs)
        boxes = [self._box(bounds, tuple(cases)) for bounds, cases in cases_by_box.items()]
        return Specification(
            self._counts["X"], self._counts["Y"], tuple(box for box in boxes if bool((box.lower <= box.upper).all()))
        )

    def _parted(self, clause: list[tuple[_LinearTerm, int]]) -> tuple[tuple[tuple[int, bool, float], ...], OutputCase]:
        """The bounds of inputs, each with whether it is an upper one, and the inequalities of outputs."""
        bounds, rows, limits = list[tuple[int, bool, float]](), list[list[float]](), list[float]()
        for linear, line in clause:
            kinds = {kind for kind, _ in linear.terms}
            if kinds == {"Y"}:
                rows.append([linear.terms.get(("Y", j), 0.0) for j in range(self._counts["Y"])])
                limits.append(0.0 - linear.constant)
            elif kinds == {"X"} and len(linear.terms) == 1:
                ((_, i), c), *_ = linear.terms.items()
                if abs(c) != 1:
                    self._refuse(line, f"X_{i} is multiplied by {c:g}; expected bounds of the inputs themselves")
                bounds.append((i, c > 0, -linear.constant * c))
            else:
                self._refuse(line, "an inequality holds several inputs, inputs and outputs, or neither; expected a box")
        if not rows:
            self._refuse(1, "there is a case without any Y_j; expected constraints of the outputs")
        return tuple(bounds), OutputCase(
            torch.tensor(rows, dtype=torch.float64), torch.tensor(limits, dtype=torch.float64)
        )

    def _box(self, bounds: tuple[tuple[int, bool, float], ...], cases: tuple[OutputCase, ...]) -> Box:
        lower, upper = [-math.inf] * self._counts["X"], [math.inf] * self._counts["X"]
        for i, above, number in bounds:
            if above:
                upper[i] = min(upper[i], number)
            else:
                lower[i] = max(lower[i], number)
        for side, numbers in (("lower", lower), ("upper", upper)):
            free = next((i for i, number in enumerate(numbers) if math.isinf(number)), None)
            if free is not None:
                self._refuse(1, f"X_{free} has no {side} bound; expected a box")
        return Box(torch.tensor(lower, dtype=torch.float64), torch.tensor(upper, dtype=torch.float64), cases)
