"""The page of an analysis: one HTML file with everything inside, which loads nothing from the network."""

from __future__ import annotations

import re
from typing import Any

from holdfast.analysis.result import Analysis, AnalyzedInput, AnalyzedLayer, Rows
from holdfast.bounds import bounds
from holdfast.report.html import script_data, template

#: Marks in front of a token that say "a space comes before": byte-level, SentencePiece, and decoded text.
_SPACE = ("Ġ", "▁", " ")
_CONTINUES = "##"  # WordPiece's mark of a token that continues the word before it
_SPECIAL = re.compile(r"\[.*\]|<.*>")
#: Heads' quantities on the page: key, title, what it means.
_QUANTITIES = (
    ("head_slope", "Local constant", "how fast this head's own output moves with the input, to first order"),
    ("softmax_norm", "Softmax norm", "largest ‖diag(p) − ppᵀ‖ over the rows; 0 is saturated, ½ the most sensitive"),
    ("attention_norm", "‖P‖", "norm of the attention matrix, from 1 up to √n where all tokens attend to one"),
    ("entropy", "Entropy", "mean entropy of a row in nats; 0 means that a query attends to one key"),
)


def render(analysis: Analysis) -> str:
    """The page as text."""
    return template("page").render(
        analysis=analysis,
        data=script_data(_payload(analysis)),
        quantities=_QUANTITIES,
        bound_cost=bounds[analysis.method].cost if analysis.method in bounds else "",
        has_bounds=any(layer.bound for layer in analysis.layers),
        proved_slope=any(layer.slope_upper for layer in analysis.layers),
        bound_notes=list(dict.fromkeys(layer.bound_note for layer in analysis.layers)),
        rebuild_error=max(layer.rebuild_error for layer in analysis.layers),
    )


def _payload(analysis: Analysis) -> dict[str, Any]:
    """What the page draws. Bounds and attained values keep every digit, since their last one is rounded outward."""
    return {
        "eps": analysis.eps,
        "inputs": [_input(view) for view in analysis.inputs],
        "layers": [_layer(layer) for layer in analysis.layers],
        "quantities": [{"key": key, "title": title, "meaning": meaning} for key, title, meaning in _QUANTITIES],
    }


def _input(view: AnalyzedInput) -> dict[str, Any]:
    marked = any(token.startswith(_SPACE) for token in view.tokens[1:])
    glued = [not t.startswith(_SPACE) if marked else t.startswith(_CONTINUES) for t in view.tokens]
    for i, token in enumerate(view.tokens):
        if _SPECIAL.fullmatch(token):  # set apart from its neighbours
            glued[i : i + 2] = [False] * len(glued[i : i + 2])
    tokens = [t.removeprefix(_CONTINUES).lstrip("".join(_SPACE)) or "␣" for t in view.tokens]
    return {"tokens": tokens, "glued": glued, "padding": view.padding, "image": view.image, "grid": view.grid}


def _layer(layer: AnalyzedLayer) -> dict[str, Any]:
    fields = {key: getattr(layer, key) for key in ("index", "name", "layer", "slope_upper", "bound", "attack")}
    fields |= {key: _rounded(getattr(layer, key)) for key, *_ in _QUANTITIES}
    return fields | {
        "slope": layer.slope,
        "note": layer.bound_note,
        "energy": _rounded(layer.energy),
        "rebuild_error": layer.rebuild_error,
        "seconds": round(layer.seconds, 3),
    }


def _rounded(rows: Rows) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in rows]
