"""Files of tensors that are cut into parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.storage import file_size, parse_size, read_metadata, read_tensors, write_tensors

SIZE = 64_000


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(150, 301),
        "half": torch.randn(77).half(),
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "ids": torch.arange(9_000).reshape(3, 3_000),
        **{f"small.{i}": torch.randn(i + 1) for i in range(150)},
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_parts_are_small_and_come_back_whole(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    write_tensors(file, tensors(), {"note": "kept"}, shard_size=SIZE)
    assert len(names(tmp_path)) > 4
    assert all(each.stat().st_size <= SIZE for each in tmp_path.iterdir())
    assert file_size(file) == sum(each.stat().st_size for each in tmp_path.iterdir())
    assert same(read_tensors(file), tensors())
    assert read_metadata(file) == {"note": "kept"}


def test_a_file_that_is_small_enough_stays_one(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"x": torch.ones(3)}, shard_size=SIZE)
    assert names(tmp_path) == ["a.safetensors"]


def test_written_again_the_old_parts_go(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    for seed in range(3):
        write_tensors(file, tensors(seed), shard_size=SIZE)
        turn = "ab"[seed % 2]
        assert all(name.startswith(f"state-{turn}") for name in names(tmp_path) if name != file.name)
        assert same(read_tensors(file), tensors(seed))
    write_tensors(file, tensors())
    assert names(tmp_path) == [file.name]
    assert same(read_tensors(file), tensors())


def test_a_write_that_fails_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.safetensors"
    write_tensors(file, tensors(0), shard_size=SIZE)
    replace, calls = Path.replace, []

    def fails(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with pytest.raises(InputError, match="No space left"):
            write_tensors(file, tensors(1), shard_size=SIZE)
    assert same(read_tensors(file), tensors(0))
    write_tensors(file, tensors(2), shard_size=SIZE)
    assert same(read_tensors(file), tensors(2))


def test_parts_that_are_missing_or_of_another_time(tmp_path: Path) -> None:
    file, part = tmp_path / "state.safetensors", tmp_path / "state-a2.safetensors"
    write_tensors(file, tensors(0), shard_size=SIZE)
    old = part.read_bytes()
    part.unlink()
    with pytest.raises(InputError, match=r"no file .*state-a2\.safetensors"):
        read_tensors(file)
    for seed in (1, 2):
        write_tensors(file, tensors(seed), shard_size=SIZE)
    part.write_bytes(old)
    with pytest.raises(InputError, match=r"state-a2\.safetensors' is not the part that .* was written with"):
        read_tensors(file)


def test_sizes() -> None:
    assert parse_size("15MB") == parse_size(" 15 mb ") == parse_size("15000000") == 15_000_000
    assert parse_size("0.1GB") == 10**8
    for text in ("", "MB", "-3MB", "15MiB", "nan", "63kB", "1e400MB"):
        with pytest.raises(InputError, match="is not a file size"):
            parse_size(text)
