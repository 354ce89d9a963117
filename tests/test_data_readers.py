"""Readers of data sets, on small files in the true formats; the real files are read where they are at hand."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from holdfast import data
from holdfast.certification.examples import read_examples
from holdfast.data.pickled import read_pickle
from holdfast.errors import InputError, UnknownNameError

BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the strings of Python 2, as the official files have them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, content):
        head = pickle.SHORT_BINSTRING + struct.pack("<B", len(content)) if len(content) < 256 else None
        self.write((head or pickle.BINSTRING + struct.pack("<i", len(content))) + content)

    dispatch[bytes] = save_bytes


def python2(content) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(content)
    return buffer.getvalue()


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 256, (4, 3073), dtype=np.uint8) for name in BATCHES}
    for row in found.values():
        row[:, 0] %= 10
    return found


@pytest.fixture
def binary(tmp_path, rows) -> Path:
    folder = tmp_path / "bin" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, content in rows.items():
        (folder / f"{name}.bin").write_bytes(content.tobytes())
    return folder.parent


@pytest.fixture
def python(tmp_path, rows) -> Path:
    folder = tmp_path / "py" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in rows.items():
        labels = [int(label) for label in content[:, 0]]
        batch = {b"data": content[:, 1:].copy(), b"labels": labels, b"batch_label": b"a", b"filenames": [b"a.png"] * 4}
        (folder / name).write_bytes(python2(batch))
    return folder.parent


def sst2_folder(tmp_path, train: bytes, dev: bytes) -> Path:
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2" / "train.tsv").write_bytes(train)
    (tmp_path / "SST-2" / "dev.tsv.gz").write_bytes(gzip.compress(dev))
    return tmp_path


def test_both_layouts_of_cifar10_give_the_same_data(binary, python, rows):
    for split, count in (("train", 20), ("test", 4)):
        first, second = (data.load("cifar10", split, folder, verify=False) for folder in (binary, python))
        assert first.inputs.shape == (count, 3, 32, 32)
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.labels, second.labels)
        assert first.checksum == second.checksum
    assert torch.equal((first.inputs * 255).round().byte().flatten(1), torch.from_numpy(rows["test_batch"][:, 1:]))
    assert first.indices.tolist() == [0, 1, 2, 3]


def test_cifar10_red_plane_comes_first_and_rows_run_across(binary, rows):
    image = data.load("cifar10", "test", binary, verify=False).inputs[2]
    assert image[1, 3, 5].item() == pytest.approx(rows["test_batch"][2, 1 + 1024 + 3 * 32 + 5] / 255)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_files_that_are_not_the_published_ones_are_refused(layout, request):
    with pytest.raises(InputError, match=r"not those published.*in Python, load it with verify=False"):
        data.load("cifar10", "test", request.getfixturevalue(layout))


def test_truncated_binary_file(binary):
    path = binary / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(InputError, match="not a whole number of images"):
        data.load("cifar10", "test", binary, verify=False)


def test_truncated_pickle(python):
    path = python / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="cannot be read as a pickle"):
        data.load("cifar10", "test", python, verify=False)


def test_pickle_of_something_else(python):
    path = python / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(python2({b"labels": [1]}))
    with pytest.raises(InputError, match="expected a dictionary with data"):
        data.load("cifar10", "test", python, verify=False)
    path.write_bytes(python2([1]))
    with pytest.raises(InputError, match="holds list"):
        data.load("cifar10", "test", python, verify=False)


class Harm:
    """What a hostile pickle does."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize(
    "harm", [Harm(os.mkdir, "made"), Harm(eval, "1"), Harm(np.load, "x"), Harm(getattr, "", "join"), Harm(type, "A")]
)
def test_a_hostile_pickle_runs_nothing(tmp_path, monkeypatch, harm):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "batch"
    for protocol in (0, 2, 4):
        path.write_bytes(pickle.dumps({b"data": harm}, protocol=protocol))
        with pytest.raises(InputError, match="it names"):
            read_pickle(path)
    assert not (tmp_path / "made").exists()


def test_arrays_of_objects_are_refused(tmp_path):
    path = tmp_path / "batch"
    path.write_bytes(python2({b"data": np.array([{}, []], dtype=object)}))
    with pytest.raises(InputError, match="only bytes are read"):
        read_pickle(path)


def test_svhn(tmp_path):
    scipy = pytest.importorskip("scipy.io")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    labels = np.array([[1], [10], [9], [2], [10]], dtype=np.uint8)
    scipy.savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": labels})
    found = data.load("svhn", "test", tmp_path, verify=False)
    assert found.labels.tolist() == [1, 0, 9, 2, 0]
    assert found.inputs.shape == (5, 3, 32, 32)
    assert found.inputs[3, 2, 7, 11].item() == pytest.approx(pixels[7, 11, 2, 3] / 255)
    with pytest.raises(InputError, match="not the published file"):
        data.load("svhn", "test", tmp_path)
    scipy.savemat(tmp_path / "test_32x32.mat", {"X": pixels[:, :, :, 0], "y": labels})
    with pytest.raises(InputError, match=r"X is \(32, 32, 3\)"):
        data.load("svhn", "test", tmp_path, verify=False)
    (tmp_path / "test_32x32.mat").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot be read as a MATLAB file"):
        data.load("svhn", "test", tmp_path, verify=False)


def test_sst2(tmp_path):
    train = b"sentence\tlabel\na fine film \t1\na dull film \t0\n"
    folder = sst2_folder(tmp_path, train, b"sentence\tlabel\na fine , dull film\t0\n")
    words = data.vocabulary(folder)
    assert words.words == ("[pad]", "[unk]", "a", "film")
    found = data.load("sst2", "dev", folder, verify=False)
    assert found.inputs.shape == (1, 32)
    assert found.inputs[0, :6].tolist() == [2, 1, 1, 1, 3, 0]
    assert found.texts == ("a fine , dull film",)
    assert data.load("sst2", "train", folder, verify=False).labels.tolist() == [1, 0]
    with pytest.raises(InputError, match="1 sentences, not those published"):
        data.load("sst2", None, folder)


@pytest.mark.parametrize(
    ("dev", "message"),
    [
        (b"sentence\tlabel\nno label here\n", "cannot be read as lines"),
        (b"sentence\tlabel\nfine\tgood\n", "cannot be read as lines"),
        (b"sentence\tlabel\nfine\t2\n", "labels 0 or 1"),
        (b"index\tsentence\nfine\t1\n", "expected a header"),
        (b"sentence\tlabel\n\xff\xfe\t1\n", "cannot be read as lines"),
    ],
)
def test_sst2_damaged(tmp_path, dev, message):
    folder = sst2_folder(tmp_path, b"sentence\tlabel\nfine\t1\n", dev)
    with pytest.raises(InputError, match=message):
        data.load("sst2", "dev", folder, verify=False)


def test_sst2_damaged_gzip(tmp_path):
    folder = sst2_folder(tmp_path, b"sentence\tlabel\nfine\t1\n", b"sentence\tlabel\nfine\t1\n")
    (folder / "SST-2" / "dev.tsv.gz").write_bytes(b"\x1f\x8b nonsense")
    with pytest.raises(InputError, match="cannot be read as lines"):
        data.load("sst2", "dev", folder, verify=False)


def test_digits_are_the_split_the_bundled_model_was_trained_on():
    pytest.importorskip("sklearn")
    test, train, bundled = data.load("digits"), data.load("digits", "train"), data.load("digits-32")
    assert (len(train), len(test), len(bundled)) == (1437, 360, 32)
    assert not set(train.indices.tolist()) & set(test.indices.tolist())
    places = {index: place for place, index in enumerate(test.indices.tolist())}
    same = test.select([places[index] for index in bundled.indices.tolist()])
    assert torch.equal(same.inputs, bundled.inputs)
    assert torch.equal(same.labels, bundled.labels)
    assert torch.equal(same.indices, bundled.indices)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.safetensors"
    save_file({"inputs": torch.rand(3, 2), "labels": torch.tensor([0, 2, 1])}, path)
    found = data.load(path)
    assert found.indices.tolist() == [0, 1, 2]
    assert [label for _, label in found] == [0, 2, 1]
    assert found.checksum == read_examples(list(found)).checksum  # a run of the pairs can be checked by the file
    save_file({"inputs": torch.rand(2, 2), "labels": torch.tensor([0, 2, 1])}, path)
    with pytest.raises(InputError, match="do not fit"):
        data.load(path)
    save_file({"images": torch.rand(2, 2)}, path)
    with pytest.raises(InputError, match="no tensor named inputs or labels; found images"):
        data.load(path)
    with pytest.raises(InputError, match="no file"):
        data.load(tmp_path / "none.safetensors")


def test_unknown_names(tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="did you mean 'cifar10'"):
        data.load("cifar-10")
    with pytest.raises(UnknownNameError, match="split of 'cifar10' 'tset': did you mean 'test'"):
        data.load("cifar10", "tset")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    for name, file in {"cifar10": "cifar-10-batches-bin", "sst2": "SST-2/dev.tsv.gz"}.items():
        with pytest.raises(InputError, match=f"is not in {tmp_path}: put .*{file}"):
            data.load(name)


def test_data_and_models_need_no_extras(binary):
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["sklearn", "scipy", "transformers", "timm", "accelerate"]))
from holdfast import data, models
images = data.load("cifar10", "test", {str(binary)!r}, verify=False).inputs
config = models.config("lofast-vit depth=2 heads=4 patch=8 attention_norm=0.5")
model = models.Transformer(config)
print(tuple(model(images).shape), len(model.to_network().stages))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(4, 10) 12\n"


def at_hand(place: str):
    return pytest.mark.skipif(not (data.data_folder() / place).exists(), reason=f"no {place} in HOLDFAST_DATA")


@at_hand("cifar-10-batches-bin")
def test_the_real_cifar10_test_set():
    found = data.load("cifar10")
    assert found.labels.bincount().tolist() == [1000] * 10


@at_hand("SST-2")
def test_the_real_sst2():
    found = data.load("sst2")
    assert found.texts[0] == "it 's a charming and often affecting journey ."
    assert (found.inputs > 0).sum(1).tolist()[0] == 9
    assert len(data.load("sst2", "train")) == 67_349
