"""The wheel, installed with all that it asks for in a fresh environment away from the checkout, keeps the promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")


@pytest.mark.slow  # downloads torch, and needs 2 GB of disk
def test_an_installed_wheel_runs_the_demo_and_the_first_snippet(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: object) -> str:
        line = [str(part) for part in command]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    source, fresh = tmp_path / "source", tmp_path / "fresh"
    # A copy: what setuptools leaves in a checkout would find its way into the next wheel.
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(fresh, with_pip=True)
    python = fresh / "bin" / "python"
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("holdfast-*.whl")
    run(python, "-m", "pip", "install", "-q", "--constraint", ROOT / "constraints.txt", f"{wheel}[demo]")
    for module in run(python, "-c", "import holdfast, torch; print(holdfast.__file__, torch.__file__)").split():
        assert Path(module).is_relative_to(fresh)

    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    lower, upper = (float(number) for number in re.findall(r"[\d.]+", run(python, "-c", snippet))[:2])
    assert 0 < lower <= upper

    shown = run(fresh / "bin" / "holdfast", "demo")
    assert (tmp_path / "out" / "demo.html").is_file()
    rows = re.findall(r"^ {4}(│.*│)$", START, re.MULTILINE)  # the table that the docs show, to the digit
    assert len(rows) == 7
    assert [row for row in rows if row not in shown] == []
    (medians,) = re.findall(r"Median certified radius.*?attack [\d.]+\.", START, re.DOTALL)
    assert " ".join(medians.split()) in " ".join(shown.split())
    shutil.rmtree(fresh)  # pytest keeps the folders of its last runs
