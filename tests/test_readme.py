"""The README keeps its promises: its example runs, its commands exist, its table names every bound."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import holdfast

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_and_has_nine_lines() -> None:
    match = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert match is not None
    example = match.group(1)
    assert len([line for line in example.splitlines() if line.strip()]) <= 9
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lower, upper = (float(number) for number in re.findall(r"[\d.]+", done.stdout)[:2])
    assert 0 < lower <= upper


def test_the_table_names_every_bound() -> None:
    for bound in holdfast.list_bounds():
        assert f"| `{bound.name}` |" in README


def test_every_link_leads_somewhere() -> None:
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target
