"""What a paper states, what the numbers say about it, and the table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from rich.table import Table

#: "sharpened": it holds, and a smaller number does, too; "undecided": these numbers do not tell.
Judgement = Literal["confirmed", "sharpened", "refuted", "undecided"]


@final
@dataclass(frozen=True)
class Statement:
    """One statement of a paper.

    Attributes:
        claim: in a few words, with the paper's formula.
        judgement: what the numbers say.
        evidence: the numbers.
    """

    claim: str
    judgement: Judgement
    evidence: str


def judged(claim: str, holds: bool, evidence: str, *, sharper: bool = False) -> Statement:
    """A statement that holds for all measured numbers or does not; `sharper` where ours is smaller on all of them."""
    return Statement(claim, "refuted" if not holds else "sharpened" if sharper else "confirmed", evidence)


def statement_table(title: str, statements: Sequence[Statement]) -> Table:
    """One row for each statement."""
    table = Table(title=title, title_justify="left", show_lines=True)
    for column in ("statement", "verdict", "numbers"):
        table.add_column(column)
    for statement in statements:
        table.add_row(statement.claim, statement.judgement, statement.evidence)
    return table


def statement_page(statements: Sequence[Statement]) -> str:
    """The same for a Markdown page."""
    rows = [f"| {_cell(one.claim)} | **{one.judgement}** | {_cell(one.evidence)} |" for one in statements]
    return "\n".join(["| statement | verdict | numbers |", "|---|---|---|", *rows]) + "\n"


def to_json(statements: Sequence[Statement]) -> list[dict[str, Any]]:
    """The same for a JSON file."""
    return [asdict(statement) for statement in statements]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
