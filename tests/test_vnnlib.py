"""VNN-LIB: what is read, what is refused and on which line, and verdicts that can be checked by hand."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast import InputError
from holdfast.layers.tokens.pooling import ClassToken
from holdfast.network.network import Head, Network
from holdfast.usage import processor_seconds
from holdfast.vnnlib import Decision, Specification, decide, read_specification
from holdfast.vnnlib.decide import _in_time, _Question, _stored
from holdfast.vnnlib.search import Search
from holdfast.vnnlib.specification import Box

DECLARED = """; two inputs, two outputs
(declare-const X_0 Real)
(declare-const X_1 Real)
(declare-fun Y_0 () Real)
(declare-const Y_1 Real)
"""
UNIT = "(assert (and (<= X_0 1) (>= X_0 (- 1.0)) (<= X_1 1.0) (>= X_1 -1e0)))\n"


def read(tmp_path: Path, text: str) -> Specification:
    path = tmp_path / "property.vnnlib"
    path.write_text(text)
    return read_specification(path)


def identity(shift: float) -> Network:
    """Y = (X_0 + shift, 0)."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    return Network((ClassToken(),), Head(weight, torch.tensor([shift, 0.0], dtype=torch.float64)), "identity")


def test_boxes_and_cases_are_read(tmp_path: Path) -> None:
    text = DECLARED + UNIT + "(assert (>= Y_0 Y_1))\n(assert (or (and (<= Y_0 3)) (>= (+ Y_0 (* 2 Y_1)) (- 4))))"
    (tmp_path / "same.vnnlib.gz").write_bytes(gzip.compress(text.encode()))
    for found in (read(tmp_path, text), read_specification(tmp_path / "same.vnnlib.gz")):
        assert (found.inputs, found.outputs, len(found.boxes)) == (2, 2, 1)
        (box,) = found.boxes
        assert box.lower.tolist() == [-1, -1]
        assert box.upper.tolist() == [1, 1]
        assert [case.A.tolist() for case in box.cases] == [[[-1, 1], [1, 0]], [[-1, 1], [-1, -2]]]
        assert [case.c.tolist() for case in box.cases] == [[0, 3], [0, 4]]


def test_disjunctions_of_inputs_are_boxes_of_their_own(tmp_path: Path) -> None:
    sides = ["(and (<= X_0 -0.5) (>= Y_0 1))", "(and (>= X_0 0.5) (>= Y_0 2))", "(and (>= X_0 7) (>= Y_0 3))"]
    found = read(tmp_path, DECLARED + UNIT + f"(assert (or {' '.join(sides)}))")
    assert [(box.lower[0].item(), box.upper[0].item()) for box in found.boxes] == [(-1, -0.5), (0.5, 1)]  # one is empty


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            DECLARED + UNIT + "(assert (< Y_0 1))",
            "line 7: '<' is not supported in an assertion; expected <=, >=, and, or",
        ),
        (
            DECLARED + "(assert (<= X_0 Y_0))",
            "line 6: an inequality holds several inputs, inputs and outputs, or neither",
        ),
        (DECLARED + "(assert (<= (* 2 X_0) 1))", "line 6: X_0 is multiplied by 2; expected bounds of the inputs"),
        (DECLARED + "(assert (<= (* Y_0 Y_0) 1))", r"line 6: '\*' is not supported in a term"),
        (DECLARED + "(assert (<= Y_2 1))", "line 6: Y_2 was not declared"),
        (DECLARED + "(assert (<= Y_0 one))", "line 6: 'one' is neither X_i, nor Y_j, nor a number"),
        (DECLARED + "(assert (<= Y_0 1)", "line 6: a bracket is opened that is never closed"),
        (DECLARED + ")", "line 6: a bracket is closed that was not opened"),
        (DECLARED + "(declare-const Y_4 Real)", "line 6: Y_4 is declared; expected Y_2, one after the other"),
        ("(declare-const Z Int)", "line 1: .declare-const Z Int. is not supported; expected X_i or Y_j of type Real"),
        (
            "(declare-network f)",
            "line 1: 'declare-network' is not supported; expected declare-const, declare-fun, assert",
        ),
        ("sat", "line 1: 'sat' stands alone"),
        (DECLARED + UNIT, "line 1: there is a case without any Y_j; expected constraints of the outputs"),
        (DECLARED + "(assert (<= Y_0 1))", "line 1: X_0 has no lower bound; expected a box"),
        ("", "no X_i or no Y_j is declared"),
        (DECLARED + "(assert (or (<= Y_0 1) (<= Y_1 1)))" * 14, "there are more than 10000 cases"),
    ],
)
def test_what_is_not_supported_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, text)


def test_files_that_cannot_be_read_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no such file; expected a VNN-LIB file, plain or \.gz"):
        read_specification(tmp_path / "none.vnnlib")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(DECLARED.encode())[:20])
    with pytest.raises(InputError, match=r"cut\.gz' cannot be read: "):
        read_specification(tmp_path / "cut.gz")


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [
        (1.5, "unsat"),
        (1.001, "unsat"),  # Y_0 falls by 1 at most; in the ball around the box it would fall by √2
        (0.9, "sat"),
    ],
)
def test_verdicts_of_a_network_that_is_known(shift: float, verdict: str, tmp_path: Path) -> None:
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= Y_0 Y_1))")
    found = decide(identity(shift), specification, shape=(1, 2))
    assert found.verdict == verdict
    if verdict == "sat":
        assert found.x is not None
        assert found.y is not None
        assert float(found.x.abs().max()) <= 1
        assert torch.equal(found.y, identity(shift)(found.x.reshape(1, 1, 2))[0])
        assert found.y[0] <= found.y[1]


def test_general_linear_constraints_and_conjunctions_are_proved(tmp_path: Path) -> None:
    """Of 3 Y_0 - Y_1 <= 4 and Y_1 >= 1, the second never holds; of the other case, the first."""
    cases = "(or (and (<= (- (* 3 Y_0) Y_1) 4) (>= Y_1 1)) (<= (* 3 Y_0) 4))"
    specification = read(tmp_path, DECLARED + UNIT + f"(assert {cases})")
    assert decide(identity(2.4), specification, shape=(1, 2)).verdict == "unsat"  # 3 (2.4 - 1) > 4
    assert decide(identity(2.3), specification, shape=(1, 2)).verdict == "sat"


@pytest.mark.parametrize(("least", "verdict"), [(-1.0, "unsat"), (-0.4, "sat"), (0.4, "sat")])
def test_numbers_of_a_constraint_count_with_their_sign(least: float, verdict: str, tmp_path: Path) -> None:
    """Y_0 runs from -0.5 to 1.5. A proof does not rest on the search: where that finds nothing, nothing is proved."""
    specification = read(tmp_path, DECLARED + UNIT + f"(assert (<= Y_0 {least}))")
    assert decide(identity(0.5), specification, shape=(1, 2)).verdict == verdict
    blind = decide(identity(0.5), specification, shape=(1, 2), search=lambda *_: ())  # type: ignore[arg-type]
    assert blind.verdict == ("unsat" if verdict == "unsat" else "unknown")


def test_an_empty_box_and_a_point_are_decided(tmp_path: Path) -> None:
    empty = "(assert (<= X_0 -2))(assert (<= Y_0 Y_1))"
    assert decide(identity(0.0), read(tmp_path, DECLARED + UNIT + empty), shape=(1, 2)).verdict == "unsat"
    point = "(assert (>= X_0 1))(assert (>= X_1 1))(assert (<= Y_0 Y_1))"
    assert decide(identity(-0.5), read(tmp_path, DECLARED + UNIT + point), shape=(1, 2)).verdict == "unsat"


def test_the_time_is_kept(tmp_path: Path) -> None:
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= Y_0 Y_1))")
    assert decide(identity(1.5), specification, shape=(1, 2), timeout=1e-9).verdict == "timeout"
    assert decide(identity(1.5), specification, shape=(1, 2), timeout=100).verdict == "unsat"


class Endless(tuple[_Question, ...]):
    """Questions that no processor comes to the end of."""

    def __iter__(self) -> Iterator[_Question]:
        while True:
            pass


@pytest.mark.parametrize("processor_time", [False, True], ids=["clock", "processor"])
def test_a_proof_ends_when_its_time_is_over(processor_time: bool) -> None:
    assert _in_time(Endless(), 0.5, processor_time) is None


def test_the_processor_may_be_the_clock(tmp_path: Path) -> None:
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= Y_0 Y_1))")
    asked = {"shape": (1, 2), "processor_time": True}
    assert decide(identity(1.5), specification, **asked, timeout=1e-9).verdict == "timeout"  # type: ignore[arg-type]
    used = processor_seconds()
    found = decide(identity(1.5), specification, **asked, timeout=100)  # type: ignore[arg-type]
    assert found.verdict == "unsat"
    assert 0.1 < found.seconds <= processor_seconds() - used  # of the proof's own process, which has to begin


def test_counter_examples_are_those_of_the_model_itself(tmp_path: Path) -> None:
    """A model that disagrees with its network in the last digit: the model decides, and nothing is claimed of it."""
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= Y_0 Y_1))")

    class Rounded(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shift = 1.0 + 1e-6 * (x.dtype == torch.float32)  # float64 agrees with what is read
            return torch.stack([x[:, 0] + shift, 0 * x[:, 0]], 1)

    found = decide(Rounded().eval(), specification, shape=(2,))
    assert found.verdict == "unknown"


def test_the_search_stays_in_the_box_and_finds_a_corner(tmp_path: Path) -> None:
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= (+ Y_0 Y_1) -1.9))")
    (box,) = specification.boxes
    found = list(Search(restarts=2)(lambda x: x, box, 0))
    assert found
    assert all(bool((x.abs() <= 1).all()) and float(x.sum()) <= -1.9 for x in found)


def test_results_are_written_as_the_competition_reads_them() -> None:
    assert Decision("unsat").to_text() == "unsat\n"
    x, y = torch.tensor([0.1, -1e-30], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    text = Decision("sat", x, y).to_text()
    assert text == "sat\n((X_0 0.1)\n(X_1 -1e-30)\n(Y_0 2.0))\n"
    assert [float(v) for v in re.findall(r"X_\d+ (\S+)\)", text)] == x.tolist()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    specification = read(tmp_path, DECLARED + UNIT + "(assert (<= Y_0 Y_1))")
    with pytest.raises(InputError, match="shape is missing; expected the shape of one input"):
        decide(identity(0.0), specification)
    with pytest.raises(InputError, match=r"has 2 inputs X_i, and an input of the model has shape \(1, 3\)"):
        decide(identity(0.0), specification, shape=(1, 3))
    with pytest.raises(InputError, match="timeout is 0; expected a positive number of seconds"):
        decide(identity(0.0), specification, shape=(1, 2), timeout=0)
    three = Network((ClassToken(),), Head(torch.zeros(3, 2).double(), torch.zeros(3).double()))
    with pytest.raises(InputError, match="the specification has 2 outputs Y_j, and the model returns 3"):
        decide(three, specification, shape=(1, 2))
    with pytest.raises(InputError, match="restarts is 0; expected at least 1"):
        Search(restarts=0)


def test_a_stored_counter_example_stays_in_a_box_that_float32_does_not_meet() -> None:
    corner = torch.tensor([0.1, -0.3, 0.7], dtype=torch.float64)
    box = Box(corner, corner + 1e-12, ())
    stored = _stored(corner + 5e-13, box)
    assert bool(((stored >= box.lower) & (stored <= box.upper)).all())
    assert torch.equal(_stored(corner, Box(corner - 1, corner + 1, ())), corner.float().double())
