"""Runs over data sets: resuming, splitting, joining and checking them."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations

from certify_cases import Deadly, exact_radii, labelled, linear_network, rows, starve
from holdfast import HoldfastError, InputError, SoundnessError
from holdfast.certification import MinimalAttack, Shard, certify, merge, read
from holdfast.certification.store import write
from holdfast.data import Dataset
from holdfast.executors.pickling import let_pickle
from holdfast.layers.linear.piece import Affine
from holdfast.layers.piece import Piece
from holdfast.models import Transformer, config
from holdfast.network.digest import weights_digest
from holdfast.network.network import Head, Network
from holdfast.results import Certificate, CertificationRun, RadiusEstimate

ATTACK = MinimalAttack(restarts=1, steps=4)
COUNT = 24


def run(path: Path | None, count: int = COUNT, **options: Any) -> CertificationRun:
    return certify(linear_network(), labelled(count), [0.1], attack=ATTACK, out=path, **options)


def same(found: CertificationRun, expected: CertificationRun) -> bool:
    """The same records: batches of other sizes round differently in the last digits, and nothing else may differ."""
    pairs = list(zip(found.records, expected.records, strict=True))
    close = [
        math.isclose(getattr(one, name), getattr(other, name), rel_tol=1e-7)
        for one, other in pairs
        for name in ("margin", "radius", "attack_radius")
    ]
    words = [
        getattr(one, name) == getattr(other, name)
        for one, other in pairs
        for name in ("index", "label", "prediction", "method", "guarantee")
    ]
    return all(close + words)


def edit(path: Path, line: int, **changes: object) -> None:
    """Changes fields of one line of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changes)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# -- what a run says


def test_radii_are_just_below_the_truth_and_attacks_just_above() -> None:
    data = labelled(COUNT)
    found = run(None)
    exact = exact_radii(linear_network(), data.inputs)
    proved, attacked = (torch.tensor([getattr(r, n) for r in found.records]) for n in ("radius", "attack_radius"))
    assert bool((proved.double() <= exact).all())
    assert bool((proved.double() >= 0.99 * exact).all())
    assert bool((attacked.double() >= exact * (1 - 1e-6)).all())
    assert [record.index for record in found.records] == data.indices.tolist()
    assert [record.label for record in found.records] == data.labels.tolist()
    assert found.clean() == 1 - 2 / COUNT
    assert all(isinstance(record, Certificate) and record.guarantee == "proved" for record in found.records)
    assert found.missing == ()


def test_numerical_runs_give_no_certificate() -> None:
    found = run(None, guarantee="numerical")
    assert all(isinstance(record, RadiusEstimate) for record in found.records)


def test_pairs_serve_as_data() -> None:
    data = labelled(4)
    pairs = [(x, int(y)) for x, y in data]
    found = certify(linear_network(), pairs, 0.1)
    assert [record.radius for record in found.records] == [record.radius for record in run(None, 4).records]
    assert found.records[0].attack_radius is None


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"batch": 0}, "batch is 0; expected at least 1"),
        ({"workers": 0}, "workers is 0; expected at least 1"),
        ({"limit": 0}, "limit is 0; expected at least 1"),
        ({"method": "besst"}, "unknown composition 'besst'"),
        ({"guarantee": "sure"}, "guarantee is 'sure'"),
        ({"perturb": "pixels"}, "perturb or normalise was given for a Network"),
    ],
)
def test_bad_calls_get_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        run(None, 2, **options)


def test_bad_data_get_one_line() -> None:
    network = linear_network()
    with pytest.raises(InputError, match="data does not consist of pairs"):
        certify(network, [1, 2], 0.1)  # type: ignore[list-item]
    with pytest.raises(InputError, match="no inputs; expected at least one"):
        certify(network, [], 0.1)
    with pytest.raises(InputError, match="several shapes or kinds"):
        certify(network, [(torch.zeros(1, 6), 0), (torch.zeros(2, 6), 0)], 0.1)
    with pytest.raises(InputError, match=r"the inputs of linear are of shape \(6,\); expected tensors"):
        certify(network, [(torch.zeros(6), 0), (torch.zeros(6), 0)], 0.1)
    with pytest.raises(InputError, match="the shard is 5/4; expected 1/4 to 4/4"):
        Shard(5, 4)


# -- going on


def test_a_file_that_ends_anywhere_is_gone_on_with(tmp_path: Path) -> None:
    """Cut at every byte of the last line, and of the header."""
    path = tmp_path / "run.jsonl"
    expected = run(path, 3)
    whole = path.read_bytes()
    header, last = whole.index(b"\n"), whole.rindex(b"\n", 0, -1)
    for end in [0, 1, header, header + 1, *range(last, len(whole), 40), len(whole) - 1]:
        path.write_bytes(whole[:end])
        assert same(run(path, 3, batch=1), expected)
        assert len(rows(path)) == 3


def test_nothing_is_computed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    run(path)
    before = path.read_bytes()

    def never(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr("holdfast.certification.workers.examine", never)
    assert len(run(path).records) == COUNT
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"method": "lofast"}, "method best against lofast"),
        ({"guarantee": "numerical"}, "guarantee proved against numerical"),
        ({"attack": False}, "attack MinimalAttack"),
        ({"seed": 1}, "seed 0 against 1"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    path = tmp_path / "run.jsonl"
    run(path, 4)
    before = path.read_bytes()
    options = {"attack": ATTACK} | change
    with pytest.raises(InputError, match=rf"other settings than this run: {word}") as found:
        certify(linear_network(), labelled(4), 0.1, out=path, **options)
    assert "\n" not in str(found.value)
    assert path.read_bytes() == before
    certify(linear_network(), labelled(4), 0.1, out=path, resume=False, **options)
    assert len(rows(path)) == 4


def test_another_model_or_other_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(path, 4)
    with pytest.raises(InputError, match=r"weights [0-9a-f]{12}… against"):
        certify(linear_network(1), labelled(4), 0.1, attack=ATTACK, out=path)
    with pytest.raises(InputError, match=r"data [0-9a-f]{12}… against"):
        certify(linear_network(), labelled(4, seed=2), 0.1, attack=ATTACK, out=path)


def test_every_number_of_a_network_is_in_its_digest() -> None:
    digests = {weights_digest(linear_network(seed)) for seed in (0, 0, 1)}
    assert len(digests) == 2
    network = linear_network()
    network.head.weight[0, 0] = torch.nextafter(network.head.weight[0, 0], torch.tensor(9.0, dtype=torch.float64))
    assert weights_digest(network) not in digests


def test_a_digest_does_not_depend_on_where_a_class_stands() -> None:
    def digest(piece: Piece) -> str:
        return weights_digest(Network((piece,), Head(torch.eye(2).double(), torch.zeros(2).double())))

    class Shift(Deadly):
        def __init__(self) -> None:
            self.by = torch.ones(2)

    here, renamed = Shift, type("Moved", (Shift,), {"kind": "Shift"})
    there = type("Shift", (Shift,), {"__qualname__": "Shift"})
    assert digest(here()) == digest(there()) == digest(renamed())
    assert digest(here()) != digest(type("Moved", (Shift,), {})())
    stored = "bc852d3a74e65395a7255dc145eff14d97baeee1cae26b906db7d10eed27d0f6"  # by the first version
    assert digest(Affine(torch.eye(2))) == stored


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def again(done: int, planned: int) -> None:
        if done:
            with pytest.raises(InputError, match="another run is writing to it"):
                run(path)

    run(path, progress=again)


def test_an_interrupt_leaves_what_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def stop(done: int, planned: int) -> None:
        if done >= 8:
            raise KeyboardInterrupt

    found = run(path, batch=4, progress=stop)
    assert len(found.records) == len(rows(path)) == 8
    assert len(found.missing) == COUNT - 8
    assert same(run(path, batch=5), run(None))


def test_numbers_do_not_depend_on_where_a_run_stopped(tmp_path: Path) -> None:
    """Inputs that stand in one batch are rounded together, and a run that goes on keeps them together."""
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, batch=3)
    for count in (6, 9, COUNT):
        run(parts, batch=3, progress=_stop_after(count))
    assert [without_seconds(line) for line in rows(parts)] == [without_seconds(line) for line in rows(whole)]


def test_radii_do_not_change_the_records(tmp_path: Path) -> None:
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    for path, radii in ((few, [0.1]), (many, [0.4, 0.01, 0.2])):
        certify(linear_network(), labelled(8), radii, out=path)
    assert [without_seconds(line) for line in rows(few)] == [without_seconds(line) for line in rows(many)]


def without_seconds(line: str) -> str:
    return json.dumps(json.loads(line) | {"seconds": 0})


# -- failing


def test_an_input_that_fails_is_recorded_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        starve(patch, 13)
        found = run(path, batch=8)
        assert (found.missing, found.failures) == ((13,), {13: "MemoryError: no room"})
        assert read(path).run().to_dict()["failures"] == {13: "MemoryError: no room"}
        assert merge([path], tmp_path / "joined.jsonl").failures == found.failures
        assert read(tmp_path / "joined.jsonl").failures == found.failures
    again = run(path)
    assert (again.missing, again.failures) == ((), {})
    assert read(path).failures == {}
    assert merge([path, tmp_path / "joined.jsonl"]).failures == {}
    assert same(again, run(None))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"failed": 2, "reason": "x"}, "the index 2 is not one of the run's"),
        ({"failed": 1, "reason": "x"}, "the index 1 occurs twice"),
        ({"failed": 1, "reason": 3}, "a line of a failure has other keys or values"),
        ({"failed": 1, "reason": "x", "more": 1}, "a line of a failure has other keys or values"),
    ],
)
def test_a_forged_failure_is_refused(tmp_path: Path, line: dict[str, object], why: str) -> None:
    path = tmp_path / "run.jsonl"
    run(path, 2)
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"line 4: .*{why}"):
        read(path)


# -- killed


def _child(path: Path, batch: int, count: int) -> None:
    torch.set_num_threads(1)
    run(path, count, batch=batch)


def killed_runs(path: Path, kills: int, count: int) -> int:
    """Starts real processes and kills them at random moments; returns how many were killed with the work unfinished."""
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    early = 0
    for _ in range(kills):
        process = context.Process(target=_child, args=(path, draw.randint(1, 5), count))
        process.start()
        before = path.stat().st_size if path.exists() else 0
        patient = draw.random() < 0.3
        while (patient or draw.random() < 0.6) and process.is_alive():  # until it has written something, or not
            time.sleep(0.004)
            if path.exists() and path.stat().st_size > before + draw.randint(0, 900):
                break
        time.sleep(draw.uniform(0, 0.03))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        early += process.exitcode == -signal.SIGKILL
    return early


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_and_repeat_nothing(tmp_path: Path, kills: int) -> None:
    path, count = tmp_path / "run.jsonl", 25 * kills
    early = killed_runs(path, kills, count)
    done = len(read(path).records)
    assert early == kills
    assert 0 < done < count  # the kills fell into the work
    found = run(path, count, batch=50)
    assert same(found, run(None, count, batch=64))
    indices = [json.loads(line)["index"] for line in rows(path)]
    assert len(indices) == len(set(indices)) == count


def test_workers_do_the_same_and_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(path, limit=None, progress=_stop_after(6), batch=3)
    found = run(path, workers=2, batch=4)
    assert same(found, run(None))


def test_models_with_parametrizations_are_sent_to_workers() -> None:
    torch.manual_seed(0)
    model = Transformer(config("digits-patches"))
    parametrizations.spectral_norm(model.attentions[0].query)  # torch's own, which has buffers
    model.eval()
    images = torch.rand(4, 1, 8, 8)
    data = Dataset("noise", "test", images, model(images).argmax(1), torch.arange(4), "unknown")
    here, there = (certify(model, data, 0.01, "gains", workers=workers) for workers in (1, 2))
    assert [one.radius for one in here.records] == [one.radius for one in there.records]
    assert all(one.radius > 0 for one in here.records)
    arrived = pickle.loads(pickle.dumps(model))
    let_pickle(arrived)
    again = pickle.loads(pickle.dumps(arrived))
    for copied in (arrived, again, copy.deepcopy(arrived)):
        assert torch.equal(copied(data.inputs), model(data.inputs))
        assert set(copied.state_dict()) == set(model.state_dict())


@pytest.mark.slow
def test_a_worker_that_ends_early_is_named(tmp_path: Path) -> None:
    network = Network((Deadly(),), linear_network().head)
    with pytest.raises(HoldfastError, match="nothing could be done: its process ended early, with status 9"):
        certify(network, labelled(4), 0.1, out=tmp_path / "run.jsonl", workers=2, batch=1)


def _stop_after(count: int) -> Any:
    def stop(done: int, planned: int) -> None:
        if done >= count:
            raise KeyboardInterrupt

    return stop


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from test_certify_runner import run
from pathlib import Path
if __name__ == "__main__":
    run(Path(sys.argv[1]), 3000, batch=int(sys.argv[2]), workers=int(sys.argv[3]))
"""


@pytest.mark.slow
def test_kills_with_workers(tmp_path: Path) -> None:
    """Whole programs with workers, killed; no worker outlives its parent for long."""
    program, path, draw = tmp_path / "program.py", tmp_path / "run.jsonl", random.Random(1)
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(5):
        command = [sys.executable, str(program), str(path), str(draw.randint(1, 9)), str(draw.randint(1, 2))]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        time.sleep(draw.uniform(4.0, 9.0))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(3.0)
    assert str(program) not in subprocess.run(["ps", "axo", "args"], capture_output=True, text=True).stdout
    indices = list(read(path).records)
    assert 0 < len(indices) == len(set(indices))
    assert same(run(path, 3000, batch=100), run(None, 3000, batch=100))


@pytest.mark.slow
def test_an_interrupt_of_the_whole_group_ends_quietly(tmp_path: Path) -> None:
    """Ctrl-C reaches the workers, too."""
    program, path = tmp_path / "program.py", tmp_path / "run.jsonl"
    program.write_text(PROGRAM.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    command = [sys.executable, str(program), str(path), "2", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not path.exists() or len(path.read_bytes().splitlines()) < 10:
        time.sleep(0.05)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert 9 <= len(read(path).records) < 3000


# -- shards


def shards(folder: Path, count: int = 3) -> list[Path]:
    paths = [folder / f"{i + 1}.jsonl" for i in range(count)]
    for i, path in enumerate(paths):
        run(path, 10, shard=Shard(i + 1, count))
    return paths


def test_shards_join_to_the_whole_run(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    assert [len(rows(path)) for path in paths] == [4, 3, 3]
    whole = merge(paths, tmp_path / "whole.jsonl")
    assert same(whole, run(None, 10))
    assert whole.missing == ()
    assert same(read(tmp_path / "whole.jsonl").run(), whole)
    assert merge(paths[1:]).missing == (1, 7, 13, 19)
    assert same(merge([*paths, tmp_path / "whole.jsonl"]), whole)  # what stands twice and agrees counts once
    assert same(run(tmp_path / "whole.jsonl", 10), whole)  # a joined file can be gone on with


def test_what_disagrees_is_not_joined(tmp_path: Path) -> None:
    one, two, _ = shards(tmp_path)
    copy = tmp_path / "copy.jsonl"
    radius, attacked = (json.loads(rows(one)[0])[name] for name in ("radius", "attack_radius"))
    for change, line in [
        ({"radius": radius / 2}, "disagree on input 1: radius"),
        ({"label": 3 - json.loads(rows(one)[0])["label"]}, "disagree on input 1: label"),
        ({"radius": radius / 3, "attack_radius": radius / 2}, "against a change at"),
    ]:
        copy.write_bytes(one.read_bytes())
        edit(copy, 1, **change)
        with pytest.raises(InputError, match=line):
            merge([one, copy])
    edit(copy, 1, radius=1.1 * attacked, attack_radius=attacked)
    with pytest.raises(SoundnessError, match=r"copy.jsonl, line 2: input 1: the radius .* is not below the distance"):
        merge([copy, two])
    run(tmp_path / "other.jsonl", 10, seed=4)
    with pytest.raises(InputError, match="are parts of different runs: seed 4 against 0"):
        merge([one, tmp_path / "other.jsonl"])


def test_a_file_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path, again = tmp_path / "run.jsonl", tmp_path / "again.jsonl"
    run(path, 5)
    write(again, read(path))
    assert again.read_bytes() == path.read_bytes()
