"""Trainings that are killed, and trainings by several processes, end at the same weights."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import holdfast.train.loop as loop
from holdfast.data.digits import demo_digits
from holdfast.train import TrainingProgress

pytestmark = pytest.mark.cluster

RUN = """
[model]
input = "image"
classes = 10
channels = 1
side = 8
patch = 4
width = 16
depth = 1
heads = 2
neck = 16

[data]
name = "{data}"
augment = [{augment}]

[train]
epochs = {epochs}
batch = 16
evaluate_every = {epochs}

[[train.losses]]
kind = "emma"
"""
KILLS = 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    digits = demo_digits()
    save_file({"inputs": digits.images, "labels": digits.labels}, tmp_path / "digits.safetensors")
    return tmp_path


def described(folder: Path, epochs: int, augment: str) -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.format(data=folder / "digits.safetensors", epochs=epochs, augment=augment))
    return file


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", "train", *arguments]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def train_until(toml: Path, folder: Path, seconds: float | None, shard_size: int | None) -> None:
    """Trains, and kills itself some seconds after the first step, if they are given."""
    torch.set_num_threads(1)
    loop._TELL_EVERY = 1
    clock = threading.Timer(seconds or 0.0, os.kill, (os.getpid(), signal.SIGKILL))

    def tell(now: TrainingProgress) -> None:
        if seconds is not None and clock.ident is None:
            clock.start()

    loop.train(toml, folder, device="cpu", checkpoint_seconds=0.02, shard_size=shard_size, progress=tell)


@pytest.mark.parametrize(("epochs", "lookahead", "shard_size"), [(300, 0, None), (100, 4, 16_000)])
def test_ten_kills_at_random_moments_change_no_bit(
    folder: Path, epochs: int, lookahead: int, shard_size: int | None
) -> None:
    """Some fall into a step, some into the writing of a checkpoint, which is one file or several."""
    toml = described(folder, epochs, augment='"shift"')
    toml.write_text(toml.read_text().replace("batch = 16", f"batch = 16\nlookahead = {lookahead}"))
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["holdfast.train.loop"])

    def train(name: str, seconds: float | None = None) -> int | None:
        process = processes.Process(target=train_until, args=(toml, folder / name, seconds, shard_size))
        process.start()
        process.join(timeout=300)
        return process.exitcode

    assert train("whole") == 0
    whole = json.loads((folder / "whole" / "run.json").read_text())["seconds"]
    chance = random.Random(0)
    for _ in range(KILLS):
        assert train("part", chance.uniform(0.05, whole / 20)) == -signal.SIGKILL
    assert 0 < json.loads((folder / "part" / "run.json").read_text())["step"] < 2 * epochs
    assert train("part") == 0
    expected, found = weights(folder / "whole"), weights(folder / "part")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_processes_train_the_model_that_one_trains(folder: Path) -> None:
    pytest.importorskip("accelerate")
    toml = described(folder, epochs=10, augment="")  # two batches an epoch
    alone, both = folder / "alone", folder / "both"
    subprocess.run(command(str(toml), "--device", "cpu", "--out", str(alone)), check=True, timeout=120, env=ONE_THREAD)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    launched = [*launcher, "holdfast", "train", str(toml), "--out", str(both)]
    env = ONE_THREAD | {"ACCELERATE_USE_CPU": "true"}
    # They also agree on when their time is over, and go on together.
    subprocess.run([*launched, "--seconds", "0"], check=True, timeout=180, env=env)
    assert json.loads((both / "run.json").read_text())["step"] == 1
    subprocess.run(launched, check=True, timeout=180, env=env)
    expected, found = weights(alone), weights(both)
    assert expected.keys() == found.keys()
    moved = max(float((expected[name].float() - found[name].float()).abs().max()) for name in expected)
    assert moved <= 1e-5
