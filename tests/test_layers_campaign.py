"""The campaign attacks every constant of every piece, and finds one that is too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.layers import Affine, LayerNorm, Mlp, Piece
from holdfast.layers.norm.piece import Normalisation
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.testing.campaign import CampaignReport, Subject, examine, run_campaign
from holdfast.testing.draw_pieces import KINDS, draw_piece
from holdfast.testing.pieces import PieceCase, constants

FEW = (1e-6, 1e-2, 0.5)


def test_finds_nothing_and_names_every_constant() -> None:
    report = run_campaign(0, demo=False, pieces=len(KINDS))
    assert report.sound, [str(finding) for finding in (*report.violations, *report.failures)]
    assert (report.layers, report.pieces) == (0, len(KINDS))
    names = {f"{kind.__name__}, {c}" for kind in KINDS for c in constants(draw_piece(kind, 1).piece)}
    assert {name for name in names if not name.endswith("curvature")} <= set(report.slack)
    assert set(report.slack) <= names
    assert {"Mlp, curvature", "LayerNorm, curvature", "RMSNorm, curvature", "SmoothProject, curvature"} <= set(
        report.slack
    )


@pytest.mark.slow
def test_finds_nothing_at_thousands_of_pieces() -> None:
    report = run_campaign(0, seed=10_000, demo=False, pieces=5000, seconds=600)
    assert report.sound, [str(finding) for finding in (*report.violations, *report.failures)]


def found(kind: type[Piece]) -> CampaignReport:
    case = draw_piece(kind, 1, extreme=False)
    if kind is LayerNorm:  # in more dimensions than two, its constants are attained
        u = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        case = PieceCase("plain", LayerNorm(torch.ones(6), torch.zeros(6), 1e-3), u)
    return examine(Subject(case, 1), FEW)


@pytest.mark.parametrize(
    ("kind", "owner", "constant", "factor"),
    [
        (LayerNorm, Normalisation, "reach", 0.999),
        (LayerNorm, Normalisation, "gain", 0.999),
        (LayerNorm, Normalisation, "curvature", 0.9),
        (Mlp, Mlp, "reach", 0.99),
        (Mlp, Mlp, "gain", 0.99),
        (Mlp, Mlp, "curvature", 0.6),
    ],
)
def test_a_constant_that_is_too_small_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: type[Piece], owner: Any, constant: str, factor: float
) -> None:
    whole = getattr(owner, constant)

    def less(self: Any, a: Arithmetic[Any], u: Any, rho: Any) -> Any:
        return whole(self, a, u, rho) * factor

    monkeypatch.setattr(owner, constant, less)
    report = found(kind)
    assert {finding.what for finding in report.violations} == {f"{kind.__name__}, {constant}"}
    assert all(finding.is_piece for finding in report.violations)


def test_an_error_in_a_piece_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, a: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Affine, "norm", broken)
    report = found(Affine)
    assert "ZeroDivisionError: on purpose" in report.failures[0].detail
    assert not report.sound


def test_command_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Affine, "norm", lambda self, a: a.lift(self.w.abs().amax() * 0.0))
    seed = str(list(KINDS).index(Affine))
    line = f"campaign --no-demo --layers 0 --pieces 1 --networks 0 --seed {seed}"
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 1
    assert line.removeprefix("campaign ") in " ".join(result.stdout.split())
