"""Forged files: each is refused, or fails when it is checked; an honest one stands."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certify_cases import CLASSES, WIDTH, labelled, linear_network
from holdfast import InputError
from holdfast.attention.movement import distance
from holdfast.certification import MinimalAttack, Settings, Shard, Verification, certify, merge, read, verify
from holdfast.certification.settings import checksum_of_inputs, fingerprint
from holdfast.compositions import proves

ATTACK = MinimalAttack(restarts=1, steps=4)
COUNT = 12

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An honest run: its inputs have the odd numbers as indices, and two of them are answered wrongly."""
    path = tmp_path_factory.mktemp("honest") / "run.jsonl"
    certify(linear_network(), labelled(COUNT), [0.1], attack=ATTACK, out=path)
    return path.read_bytes()


@pytest.fixture
def path(honest: bytes, tmp_path: Path) -> Path:
    """The file of an honest run, to forge."""
    (tmp_path / "run.jsonl").write_bytes(honest)
    return tmp_path / "run.jsonl"


def load(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def sign(header: dict[str, Any]) -> None:
    """Makes the checksums of a forged header fit what it says."""
    header["fingerprint"], header["inputs"] = fingerprint(header["settings"]), checksum_of_inputs(header["indices"])


def forge(path: Path, change: Callable[[Lines], object]) -> None:
    """Edits a file and signs it again, as a forger would who knows how."""
    lines = load(path)
    change(lines)
    sign(lines[0])
    save(path, lines)


def check(path: Path, **options: Any) -> Verification:
    return verify(path, linear_network(), labelled(COUNT), **{"sample": None} | options)


# -- what is true stands


def test_a_run_stands_when_it_is_checked(path: Path) -> None:
    for batch in (1, 5):
        found = check(path, batch=batch)
        assert found.sound
        assert len(found.checked) == found.witnesses == found.inputs == found.available == COUNT
        assert (found.seed, found.weaker) == (None, ())
    assert found.accuracy == (read(path).run().accuracy(0.1),)


def test_a_sample_is_fresh_and_can_be_repeated(path: Path) -> None:
    drawn = [check(path, sample=4) for _ in range(8)]
    assert all(each.sound and len(each.checked) == 4 for each in drawn)
    assert len({each.seed for each in drawn}) == 8
    assert len({each.checked for each in drawn}) > 1
    assert check(path, sample=4, seed=drawn[0].seed).checked == drawn[0].checked
    assert any("8 records that were not drawn" in each for each in drawn[0].unchecked)


def test_who_forges_what_one_seed_does_not_draw_is_found_by_others(path: Path) -> None:
    drawn = check(path, sample=4, seed=0).checked

    def enlarge(lines: Lines) -> None:
        for line in lines[1:]:
            if line["index"] not in drawn:
                line["radius"] = (line["radius"] + line["attack_radius"]) / 2

    forge(path, enlarge)
    assert check(path, sample=4, seed=0).sound
    assert any(not check(path, sample=4).sound for _ in range(8))  # all eight miss with probability (1/495)⁸


def test_less_than_is_proved_may_be_claimed_and_is_told(path: Path) -> None:
    forge(path, lambda lines: lines[3].update(radius=lines[3]["radius"] / 2))
    found = check(path)
    assert found.sound
    assert found.weaker == (5,)


def test_the_order_of_records_and_a_negative_zero_claim_nothing(path: Path) -> None:
    before = read(path).run()
    lines = load(path)
    lines[4]["radius"] = -0.0
    save(path, [lines[0], *reversed(lines[1:])])
    assert check(path).sound
    assert [record.index for record in read(path).run().records] == [record.index for record in before.records]
    assert read(path).run().accuracy(0.0) == before.accuracy(0.0)
    assert read(path).run().accuracy(1e-9) < before.accuracy(1e-9)


# -- inputs that are left out


def worst(lines: Lines) -> set[int]:
    return {line["index"] for line in lines[1:] if line["label"] != line["prediction"] or line["radius"] < 0.1}


def test_inputs_cannot_be_left_out(path: Path) -> None:
    before = check(path).accuracy[0]

    def drop(lines: Lines) -> None:
        bad = worst(lines)
        lines[0]["indices"] = [index for index in lines[0]["indices"] if index not in bad]
        lines[1:] = [line for line in lines[1:] if line["index"] not in bad]

    forge(path, drop)
    assert read(path).run().accuracy(0.1) == 1.0 > before
    with pytest.raises(InputError, match=r"run.jsonl asks for inputs that are not the first \d+ of the data"):
        check(path)


def test_what_is_missing_is_a_failure_and_not_certified(path: Path) -> None:
    before = check(path).accuracy

    def drop(lines: Lines) -> None:
        bad = worst(lines)
        lines[1:] = [line for line in lines[1:] if line["index"] not in bad]

    forge(path, drop)
    found = check(path, sample=2)
    assert not found.sound
    assert found.failures[0].startswith(f"{COUNT - len(read(path).records)} of {COUNT} inputs have no record: 1")
    assert found.accuracy == before


def test_a_file_without_records_does_not_stand(path: Path) -> None:
    forge(path, lambda lines: lines.__delitem__(slice(1, None)))
    assert not check(path).sound


def test_a_file_that_was_cut_does_not_stand(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    assert check(path).failures == (f"1 of {COUNT} inputs have no record: {2 * COUNT - 1}",)


def test_fewer_inputs_are_told(path: Path) -> None:
    """The beginning of a run is a run; what it says it is of stands in the verdict."""

    def shorten(lines: Lines) -> None:
        lines[0]["indices"] = lines[0]["indices"][:5]
        lines[6:] = []

    forge(path, shorten)
    found = check(path)
    assert (found.sound, found.inputs, found.available) == (True, 5, COUNT)


def test_inputs_in_another_order_are_refused(path: Path) -> None:
    forge(path, lambda lines: lines[0].update(indices=lines[0]["indices"][::-1]))
    with pytest.raises(InputError, match="inputs that are not the first 12 of the data"):
        check(path)


# -- records that claim too much


def packed(numbers: Any) -> str:
    return base64.b64encode(np.asarray(numbers, dtype="<f4").tobytes()).decode()


def unpacked(row: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(row["perturbation"]), "<f4")


def without_witness(row: dict[str, Any]) -> None:
    del row["perturbation"], row["shape"]


def lengthen(row: dict[str, Any]) -> None:
    """Twice the perturbation still changes the answer, and its norm is what it says."""
    delta = 2 * unpacked(row)
    x = labelled(COUNT).inputs[row["index"] // 2].double()
    moved = x + torch.from_numpy(delta).double()
    row.update(perturbation=packed(delta), attack_radius=float(distance(x, moved).upper))


OVERSTATED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "radius": (lambda r: r.update(radius=(r["radius"] + r["attack_radius"]) / 2), "radius"),
    "radius by 9e-6": (lambda r: r.update(radius=r["radius"] * (1 + 9e-6)), "radius"),
    "margin": (lambda r: r.update(margin=r["margin"] * (1 + 1e-8)), "margin"),
    "label": (lambda r: r.update(label=(r["label"] + 1) % CLASSES), "label"),
    "prediction": (lambda r: r.update(prediction=(r["prediction"] + 1) % CLASSES), "prediction"),
    "right answer": (lambda r: r.update(prediction=r["label"] + 0, label=r["label"] + 1), "label"),
    "method": (lambda r: r.update(method="lofast"), "method 'lofast' against"),
    "perturbation": (lambda r: r.update(perturbation=packed(np.zeros(WIDTH))), "does not change the answer"),
    "no numbers": (lambda r: r.update(perturbation=packed(np.full(WIDTH, np.nan))), "does not change the answer"),
    "attack radius below": (lambda r: r.update(attack_radius=r["attack_radius"] * 0.99999), "has norm"),
    "attack radius above": (lambda r: r.update(attack_radius=r["attack_radius"] * 2), "has norm"),
    "longer perturbation": (lengthen, "attack radius"),
    "no perturbation": (without_witness, "there is no perturbation of shape"),
    "another shape": (lambda r: r.update(perturbation=packed(unpacked(r)[:2]), shape=[1, 2]), "no perturbation of"),
}


@pytest.mark.parametrize("name", OVERSTATED)
def test_what_was_made_up_is_found(path: Path, name: str) -> None:
    change, word = OVERSTATED[name]
    forge(path, lambda lines: change(lines[4]))
    found = check(path)
    assert not found.sound
    assert all(failure.startswith("input 7: ") for failure in found.failures)
    assert word in "; ".join(found.failures)


def test_labels_are_checked_whatever_is_drawn(path: Path) -> None:
    forge(path, lambda lines: [line.update(label=line["prediction"]) for line in lines[1:]])
    assert read(path).run().clean() == 1.0
    assert len(check(path, sample=1).failures) >= 2


def test_a_radius_beyond_what_was_found_must_be_proved_itself() -> None:
    """The room that a search leaves is given to what is proved there, and to nothing else."""
    network, x = linear_network(), labelled(2).inputs.double()
    (found, _) = certify(network, labelled(2), 0.1).records
    how: dict[str, Any] = {"method": found.method, "guarantee": "proved"}
    assert proves(network, x, 0, found.radius, **how)
    assert not proves(network, x, 0, found.radius * 1.01, **how)
    assert not proves(network, x, 0, math.inf, **how)
    assert not proves(network, x, 0, math.nan, **how)
    assert not proves(network, x, 0, found.radius, method="best", guarantee="proved")


def test_an_attack_column_cannot_be_emptied(path: Path) -> None:
    def empty(lines: Lines) -> None:
        for row in lines[1:]:
            row["attack_radius"] = "inf"
            without_witness(row)

    forge(path, empty)
    assert read(path).run().attacked(0.1) > 0.5
    failures = check(path).failures
    assert len(failures) == COUNT
    assert all("attack radius inf against a change at " in failure for failure in failures)
    forge(path, lambda lines: [row.update(attack_radius=None) for row in lines[1:]])
    with pytest.raises(InputError, match="line 2: the attack radius is None with the attack MinimalAttack"):
        check(path)


def test_a_run_without_an_attack_claims_none(path: Path) -> None:
    def empty(lines: Lines) -> None:
        lines[0]["settings"]["attack"] = "none"
        del lines[0]["settings"]["seed"]

    forge(path, empty)
    with pytest.raises(InputError, match=r"line 2: the attack radius is 0\..* with the attack none"):
        check(path)


# -- settings that were edited, in a file whose checksums fit


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"weights": "0" * 64}, "something other than what was given: weights"),
        ({"data": "0" * 64}, "something other than what was given: data"),
        ({"guarantee": "numerical"}, "line 2: a proved record in another run"),
        ({"guarantee": "Proved"}, "line 2: a proved record in another run"),
        ({"method": "bst"}, "unknown composition 'bst'"),
        ({"perturb": "words"}, "the perturbation is 'words'"),
        ({"normalise": "[1"}, "the setting normalise is"),
        ({"normalise": "[[0.5], [0.1]]"}, "perturb or normalise was given for a Network"),
        ({"attack": "MinimalAttack(hope=3)"}, "the setting attack is"),
        ({"attack": "MinimalAttack(restarts=1) and more"}, "the setting attack is"),
        ({"seed": "x"}, "the setting seed is 'x'"),
        ({"hope": "much"}, "the settings are .*hope; was the file edited"),
        ({"norm": "linf"}, "a record in the norm l2 in another run"),
        ({"clip": "0.0,1.0"}, "clip is .* with the norm l2"),
        ({"at": "nan"}, "at is nan; expected positive radii"),
        ({"seconds": "5"}, "the setting seconds is '5'; expected words such as '5.0'"),
        ({"seed": 3}, "a setting is not text"),
    ],
)
def test_settings_that_were_edited_are_refused(path: Path, change: dict[str, Any], line: str) -> None:
    forge(path, lambda lines: lines[0]["settings"].update(change))
    with pytest.raises(InputError, match=line) as found:
        check(path)
    assert "\n" not in str(found.value)


def test_another_method_does_not_prove_the_same(path: Path) -> None:
    """The radii of the best composition under the name of another one."""

    def rename(lines: Lines) -> None:
        lines[0]["settings"]["method"] = "lofast"
        for row in lines[1:]:
            row["method"] = "lofast"

    forge(path, rename)
    assert any("radius" in failure for failure in check(path).failures)


def test_estimates_are_no_proofs(tmp_path: Path) -> None:
    """A numerical run whose every word says proved; its radii are a little beyond what can be."""
    path, how = tmp_path / "run.jsonl", {"method": "layerwise", "guarantee": "numerical"}
    certify(linear_network(), labelled(COUNT), [0.1], out=path, **how)  # type: ignore[arg-type]

    def rename(lines: Lines) -> None:
        lines[0]["settings"]["guarantee"] = "proved"
        for row in lines[1:]:
            row["guarantee"] = "proved"

    assert check(path).sound
    forge(path, rename)
    assert any("radius" in failure for failure in check(path).failures)


def test_another_version_is_told(path: Path) -> None:
    forge(path, lambda lines: lines[0]["settings"].update(holdfast="9.9.9"))
    assert any("that Holdfast 9.9.9 made the run" in each for each in check(path).unchecked)


def test_a_run_is_checked_against_its_own_model_and_data(path: Path) -> None:
    with pytest.raises(InputError, match="was made from something other than what was given: weights"):
        verify(path, linear_network(1), labelled(COUNT))
    with pytest.raises(InputError, match="was made from something other than what was given: data"):
        verify(path, linear_network(), labelled(COUNT, seed=2))
    chosen = labelled(COUNT).select(torch.arange(2, COUNT))
    with pytest.raises(InputError, match="inputs that are not the first 12 of the data 'made up'"):
        verify(path, linear_network(), chosen)


# -- lines that certify does not write


EDITED: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "there is no complete line"),
    "else": (lambda text: "hello\n", "the first line is not a header"),
    "list": (lambda text: "[]\n", "the first line is not a header"),
    "schema": (lambda text: '{"schema": "else"}\n', "the schema is 'else'"),
    "no header": (lambda text: text.split("\n", 1)[1], "the schema is None"),
    "header key": (lambda text: text.replace('"split"', '"spilt"', 1), "the header does not fit"),
    "header extra": (lambda text: text.replace('"split"', '"limit":3,"split"', 1), "the header does not fit"),
    "fingerprint": (lambda text: text.replace('"method":"best"', '"method":"lofast"', 1), "the fingerprint is not"),
    "inputs": (
        lambda text: text.replace('"indices":[1,3', '"indices":[3', 1),
        "the inputs do not match their checksum",
    ),
    "input twice": (lambda text: text.replace('"indices":[1,3', '"indices":[1,1', 1), "an index occurs twice"),
    "real input": (lambda text: text.replace('"indices":[1,', '"indices":[1.0,', 1), "not a list of whole numbers"),
    "true input": (lambda text: text.replace('"indices":[1,', '"indices":[true,', 1), "not a list of whole numbers"),
    "radii": (lambda text: text.replace('"radii":[0.1]', '"radii":[-1]', 1), "radii is -1.0; expected a finite"),
    "key": (lambda text: text.replace('"margin"', '"marge"', 1), "line 2: no record"),
    "extra key": (lambda text: text.replace('"margin"', '"side":"upper","margin"', 1), "line 2: no record"),
    "key twice": (lambda text: text.replace('"radius":', '"radius":0.9,"radius":', 1), "line 2: .*a key occurs twice"),
    "comma": (lambda text: text.replace('{"index":1,', '{"index":1,,', 1), "line 2: no record"),
    "record twice": (lambda text: text + text.splitlines()[-1] + "\n", "the index 23 occurs twice"),
    "other index": (lambda text: text.replace('{"index":1,', '{"index":2,', 1), "the index 2 is not one of the run's"),
    "real index": (lambda text: text.replace('{"index":1,', '{"index":1.0,', 1), "line 2: no record .index is 1.0"),
    "true index": (lambda text: text.replace('{"index":1,', '{"index":true,', 1), "line 2: no record .index is True"),
    "guarantee": (lambda text: text.replace('"proved","attack_r', '"numerical","attack_r', 1), "a numerical record"),
}


@pytest.mark.parametrize("name", EDITED)
def test_files_that_were_edited_are_refused(path: Path, name: str) -> None:
    change, line = EDITED[name]
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(InputError, match=line) as found:
        read(path)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("field", ["margin", "radius", "seconds", "attack_radius"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "true", '"9"', "7"])
def test_what_is_no_number_is_refused(path: Path, field: str, number: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    before, value = lines[1].split(f'"{field}":', 1)
    lines[1] = (
        f'{before}"{field}":{number},{value.split(",", 1)[1]}' if "," in value else f'{before}"{field}":{number}}}'
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: "):
        read(path)


def test_no_file_is_refused() -> None:
    with pytest.raises(InputError, match=r"'nowhere.jsonl' cannot be read"):
        read("nowhere.jsonl")


def test_a_refused_file_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"what matters\nand has no end of line")
    with pytest.raises(InputError, match="the first line is not a header"):
        certify(linear_network(), labelled(2), 0.1, out=path)
    assert path.read_bytes() == b"what matters\nand has no end of line"


# -- joined files


def test_shards_that_overlap_and_differ_are_not_joined(path: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.jsonl"
    forged.write_bytes(path.read_bytes())
    forge(forged, lambda lines: lines[2].update(radius=lines[2]["radius"] * 0.999))
    with pytest.raises(InputError, match="disagree on input 3: radius"):
        merge([path, forged])
    forge(forged, lambda lines: lines.__setitem__(slice(1, None), lines[5:]))
    forge(forged, lambda lines: lines[0].update(indices=lines[0]["indices"][4:]))
    with pytest.raises(InputError, match=r"forged.jsonl is about other inputs than the rest"):
        merge([path, forged])


# -- a run that grows


def grow(path: Path, limit: int | None, **options: Any) -> Any:
    return certify(linear_network(), labelled(COUNT), [0.1], attack=ATTACK, out=path, limit=limit, **options)


def test_a_file_goes_on_to_more_inputs_and_keeps_what_was_proved(path: Path, tmp_path: Path) -> None:
    whole, grown = read(path).run(), tmp_path / "grown.jsonl"
    grow(grown, 4)
    before = grown.read_bytes()
    assert check(grown).inputs == 4
    for limit in (7, 7, None):
        run = grow(grown, limit)
        assert grown.read_bytes().startswith(before)
        assert len(run.records) == (limit or COUNT)
        assert run.missing == ()
    assert [record.radius for record in run.records] == pytest.approx([r.radius for r in whole.records], rel=1e-9)
    found = check(grown)
    assert (found.sound, found.inputs) == (True, COUNT)
    text = grown.read_bytes()
    with pytest.raises(InputError, match="covers 12 inputs and this run 4, fewer; a file only takes more"):
        grow(grown, 4)
    chosen = labelled(COUNT).select([1, 0, *range(2, COUNT)])
    with pytest.raises(InputError, match="covers 12 inputs and this run 12, others"):
        certify(linear_network(), chosen, [0.1], attack=ATTACK, out=grown)
    assert grown.read_bytes() == text


def test_shards_of_which_some_have_grown_are_joined(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for part, file in enumerate((one, two), 1):
        grow(file, 6, shard=Shard(part, 2))
    grow(two, None, shard=Shard(2, 2))
    joined = merge([one, two], tmp_path / "joined.jsonl")
    assert joined.missing == (13, 17, 21)
    assert grow(tmp_path / "joined.jsonl", None).missing == ()
    assert check(tmp_path / "joined.jsonl").sound


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda row: row.update(indices=[3]), "an index occurs twice"),
        (lambda row: row.update(indices=row["indices"][1:]), "the inputs do not match their checksum"),
        (lambda row: row.update(indices=[]), "not a list of whole numbers"),
        (lambda row: row.update(limit=9), "has other keys"),
    ],
)
def test_a_line_that_asks_for_inputs_is_checked(tmp_path: Path, change: Any, line: str) -> None:
    path = tmp_path / "run.jsonl"
    grow(path, 3)
    grow(path, 5)
    lines = load(path)
    change(lines[4])
    save(path, lines)
    with pytest.raises(InputError, match=f"line 5: .*{line}"):
        read(path)


# -- files of former versions


def former(path: Path) -> None:
    """Rewrites a file as the first schema had it."""
    lines = load(path)
    header = lines[0]
    header["settings"]["inputs"] = header.pop("inputs")
    lines[0] = header | {"schema": "holdfast.certify/1", "limit": None, "fingerprint": fingerprint(header["settings"])}
    save(path, lines)


def test_files_of_the_first_schema_are_read_checked_and_gone_on_with(path: Path) -> None:
    honest = read(path)
    former(path)
    assert read(path).header == honest.header
    assert check(path).sound
    assert grow(path, None).missing == ()
    lines = load(path)
    lines[0]["indices"] = lines[0]["indices"][:-1]
    save(path, lines[:-1])
    with pytest.raises(InputError, match="the inputs do not match their checksum"):
        read(path)


def test_settings_can_be_read_back() -> None:
    for settings in (
        Settings(),
        Settings(attack=ATTACK, seed=-3),
        Settings("lofast", "numerical", perturb=("word", 3), normalise=((0.5, 0.1), (2.0, 1.0))),
    ):
        assert Settings.from_dict(settings.to_dict()) == settings
