"""Arrows between packages go one way, and the architecture page shows every one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.testing.architecture import DOORS, PACKAGE, Arrows, arrows, order, shown, with_arrows

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


@pytest.fixture(scope="module")
def graph() -> Arrows:
    return arrows()


def test_arrows_go_one_way(graph: Arrows) -> None:
    assert set(order(graph)) == set(graph)
    for part, targets in graph.items():
        for door in DOORS:
            assert part in DOORS or door not in targets, f"{part} imports {door}: {targets.get(door)}"


def test_the_page_shows_every_arrow_and_a_part_imports_only_what_stands_above_it(graph: Arrows) -> None:
    page = shown(PAGE)
    assert set(page) == set(graph)
    above: set[str] = set()
    for part, targets in page.items():
        for target, places in graph[part].items():
            assert target in targets, f"{part} imports {target} at {places}; the page does not show it"
            assert target in above, f"{part} imports {target} at {places}, which stands below it on the page"
        assert targets == set(graph[part]), f"the page shows arrows of {part} that the source does not have"
        above.add(part)
    assert with_arrows(PAGE, graph) == PAGE


def test_a_cycle_an_import_in_a_function_and_a_hidden_arrow_are_seen(tmp_path: Path) -> None:
    package = tmp_path / "house"
    for part, source in {"a": "def f():\n    from house.b import x\n", "b": "import house.c.d\n", "c": ""}.items():
        (package / part).mkdir(parents=True)
        (package / part / "__init__.py").write_text(source)
    assert arrows(package) == {"a": {"b": ("a/__init__.py:2",)}, "b": {"c": ("b/__init__.py:1",)}, "c": {}}
    assert order(arrows(package)) == ["c", "b", "a"]
    (package / "c" / "d.py").write_text("from house import a\n")
    with pytest.raises(ValueError, match="a cycle: a → b → c → a"):
        order(arrows(package))


def test_no_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^\s*class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            places.setdefault(name.lstrip("_"), []).append(str(file.relative_to(PACKAGE)))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
