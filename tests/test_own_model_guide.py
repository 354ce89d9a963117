"""The guide to your own model keeps its promises: its code runs, and it names every operator that is read."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from holdfast.graph.operators import OPERATORS

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "your-own-model.md").read_text(encoding="utf-8")


def test_the_code_runs_from_the_class_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == 5
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "x + LayerNorm → Attention" in printed
    assert "operator 'elu'" in printed
    assert "guide.py:" in printed  # the line of the user's own code
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_every_operator_that_is_read_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", GUIDE))
    assert {name for name in OPERATORS if not name.startswith("_") and not name.endswith("_")} <= named
