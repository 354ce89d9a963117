"""Certificates, and runs of them: what they refuse and what they count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast import InputError, SoundnessError
from holdfast.results import UNDECIDED, Certificate, CertificationRun, RadiusEstimate

GOOD: dict[str, Any] = {
    "index": 3,
    "label": 1,
    "prediction": 1,
    "margin": 0.5,
    "radius": 0.1,
    "method": "layerwise",
    "guarantee": "proved",
    "attack_radius": 0.2,
}


def run_of(*records: Certificate | RadiusEstimate, missing: tuple[int, ...] = ()) -> CertificationRun:
    settings = {"method": "best", "guarantee": "proved", "weights": "w", "data": "d", "holdfast": "0"}
    return CertificationRun("made up", "numbers", (0.1, 0.2), records, missing, settings, "f" * 64)


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        ({"guarantee": "numerical"}, InputError, "input 3: the guarantee is 'numerical'; a certificate needs proved"),
        ({"side": "estimate"}, InputError, "input 3: the side is 'estimate'; a proved radius is a lower bound"),
        ({"side": "upper"}, InputError, "input 3: the side is 'upper'"),
        ({"radius": math.nan}, InputError, "input 3: the radius is nan; expected a finite number"),
        ({"radius": math.inf, "attack_radius": None}, InputError, "input 3: the radius is inf"),
        ({"radius": -0.1}, InputError, "input 3: the radius is -0.1; expected a finite number that is not negative"),
        ({"margin": math.nan}, InputError, "input 3: the margin is nan"),
        ({"attack_radius": math.nan}, InputError, "input 3: the attack radius is nan"),
        ({"attack_radius": -1.0}, InputError, "input 3: the attack radius is -1.0"),
        ({"attack_radius": 0.09}, SoundnessError, "the radius 0.1 is not below the distance 0.09 of a perturbation"),
        ({"attack_radius": 0.1}, SoundnessError, "the radius 0.1 is not below the distance 0.1"),
        ({"prediction": UNDECIDED}, SoundnessError, "a positive radius needs a decided prediction"),
        ({"margin": 0.0}, SoundnessError, "a positive radius needs a decided prediction and a positive margin"),
    ],
)
def test_a_certificate_refuses_what_is_not_proved(change: dict[str, Any], error: type[Exception], line: str) -> None:
    Certificate(**GOOD)
    with pytest.raises(error, match=line) as found:
        Certificate(**GOOD | change)
    assert "\n" not in str(found.value)


def test_an_estimate_is_another_class_and_never_proved() -> None:
    with pytest.raises(InputError, match="the guarantee is 'proved'; an estimate is 'numerical'"):
        RadiusEstimate(**GOOD)
    assert not isinstance(RadiusEstimate(**GOOD | {"guarantee": "numerical"}), Certificate)


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Certificate(**GOOD).radius = 1.0  # type: ignore[misc]


def test_accuracies_count_what_is_right_and_stays_so() -> None:
    run = run_of(
        Certificate(**GOOD),
        Certificate(**GOOD | {"index": 4, "radius": 0.15, "attack_radius": math.inf}),
        Certificate(**GOOD | {"index": 5, "label": 2}),  # wrong, however robust
        Certificate(
            **GOOD | {"index": 6, "prediction": UNDECIDED, "margin": -1.0, "radius": 0.0, "attack_radius": 0.0}
        ),
    )
    assert run.clean() == 0.5
    assert [run.accuracy(r) for r in (0.0, 0.1, 0.12, 0.15, 0.16)] == [0.5, 0.5, 0.25, 0.25, 0.0]
    assert [run.attacked(r) for r in (0.0, 0.19, 0.2, 5.0)] == [0.5, 0.5, 0.25, 0.25]
    assert run.to_dict()["records"][1]["attack_radius"] == "inf"


def test_a_run_without_what_is_asked_says_so() -> None:
    with pytest.raises(InputError, match="no input is done"):
        run_of(missing=(3,)).accuracy(0.1)
    with pytest.raises(InputError, match="the run has no attack"):
        run_of(Certificate(**GOOD | {"attack_radius": None})).attacked(0.1)
    with pytest.raises(InputError, match="radius is -1"):
        run_of(Certificate(**GOOD)).accuracy(-1)
