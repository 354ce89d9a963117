"""Model cards: what a trained model is, how it was made, what is proved about it and what that means, as Markdown."""

from __future__ import annotations

import json
import shlex

from holdfast.models.shelf import Shelved, ShelvedRun
from holdfast.results import at_least, at_most

_LICENCE = "apache-2.0"


def card(model: Shelved, source: str | None = None) -> str:
    """The card of a model; every number in it comes from the model's own file.

    Args:
        model: what its file says about it.
        source: what it is loaded by: the path of its file, or, by default, its name on the shelf.
    """
    parts = [
        _front_matter(model),
        f"# {model.name}",
        _summary(model),
        "## Use\n\n" + _use(model, source or model.name),
        "## What is proved\n\n" + _proved(model),
        "## Data\n\n" + _data(model),
        "## Recipe\n\n" + _recipe(model),
        f"## Licence\n\nApache-2.0, as Holdfast itself. {_owners(model)}".rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(model: Shelved) -> str:
    lines = [f"license: {_LICENCE}", "library_name: holdfast", "tags:", "- certified-robustness"]
    if names := _data_sets(model):
        lines += ["datasets:", *(f"- {name}" for name in names)]
    return "\n".join(["---", *lines, "---"])


def _summary(model: Shelved) -> str:
    c = model.config
    count = model.training.get("parameters")
    size = f" with {count:,} parameters" if count else ""
    side, words = c.get("side"), f"texts of up to {c.get('tokens')} words"
    kind = words if _takes_words(model) else f"images of {c['channels']} × {side} × {side}"
    usual = ": pre-LayerNorm, GELU, biases, no layer limited in any way" if model.kind == "VisionTransformer" else ""
    return (
        f"A classifier of {kind} into {c['classes']} classes: a transformer{size}, with unmodified softmax attention "
        f"in {c['depth']} blocks{usual}. It was trained so that its answers can be certified."
    )


def _use(model: Shelved, source: str) -> str:
    data = next(iter(_data_sets(model)), "DATA")
    known = next(iter(model.certified), None)
    how = "--method gains" if known is None else f"--method {known.method} --at {','.join(known.accuracy)}"
    return (
        "```python\nimport holdfast.models\n\n"
        f"model = holdfast.models.load({json.dumps(source)})  # a torch module, frozen\n```\n\n"
        f"    holdfast certify {shlex.quote(source)} --data {shlex.quote(data)} --limit 10 {how}"
    )


def _proved(model: Shelved) -> str:
    if not model.certified:
        return "Nothing was certified for these weights."
    tables = [_run(run) for run in model.certified]
    moved = "the embeddings of all words" if _takes_words(model) else "the pixels"
    meaning = (
        f"*Certified at a radius* is the share of inputs with the right answer for which no change of {moved} whose l2 "
        "length is at most the radius changes the answer. It holds for the exact function of these weights, over all "
        "such changes and not only those that an attack tries. It says nothing about other inputs, larger changes, "
        "other kinds of change, or how often the answer is right elsewhere."
    )
    if any(run.guarantee != "proved" for run in model.certified):
        meaning += " Where the guarantee is numerical the number is an estimate and no proof."
    return "\n\n".join([*tables, meaning])


def _run(run: ShelvedRun) -> str:
    """One table; clean and certified accuracy are those of the same inputs."""
    attacked = [f" {at_most(run.attacked[radius])} % |" for radius in run.accuracy] if run.attacked else []
    columns = f"| radius | {run.guarantee} |" + (" after an attack |" if attacked else "")
    lines = [
        f"{run.inputs:,} inputs of {run.data}, {at_least(run.clean)} % of them answered rightly; by `{run.method}`:",
        "",
        columns,
        "|---" * (columns.count("|") - 1) + "|",
        *(
            f"| {radius} | {at_least(share)} % |" + (attacked[place] if attacked else "")
            for place, (radius, share) in enumerate(run.accuracy.items())
        ),
    ]
    return "\n".join(lines) + (f"\n\n    {run.command}" if run.command else "")


def _data(model: Shelved) -> str:
    test = model.training.get("test", {})
    how = "Trained and certified" if model.certified else "Trained"
    lines = [f"{how} on {', '.join(names)}." if (names := _data_sets(model)) else "Not recorded."]
    if "clean" in test:
        off = f", and {at_least(test['content_off'])} % if attention sees no content" if "content_off" in test else ""
        share = f"{at_least(test['clean'])} % are answered rightly{off}"
        lines.append(f"Of all {test['inputs']:,} inputs of the split `{test['split']}` {share}.")
    if "measured_on" in model.training:
        lines.append(f"During training it was measured on {model.training['measured_on']}.")
    return " ".join(lines)


def _recipe(model: Shelved) -> str:
    t = model.training
    lines = [f"    {model.command}"] if model.command else []
    words = [f"seed {model.seed}"] if model.seed else []
    words += [f"{t['step']:,} steps"] if "step" in t else []
    words += [f"{t['seconds']:.0f} s on {t['device']}"] if "seconds" in t and "device" in t else []
    words += [f"{name} {version}" for name, version in t.get("versions", {}).items()]
    if words:
        lines.append(f"It had {', '.join(words)}.")
    config = t.get("config") or {"model": model.config}
    return "\n\n".join([*lines, f"```json\n{json.dumps(config, indent=1)}\n```"])


def _takes_words(model: Shelved) -> bool:
    return model.config.get("input") == "words"


def _data_sets(model: Shelved) -> list[str]:
    trained = model.training.get("config", {}).get("data")
    name = trained.get("name") if isinstance(trained, dict) else trained
    return list(dict.fromkeys([*([name] if isinstance(name, str) else []), *(run.data for run in model.certified)]))


def _owners(model: Shelved) -> str:
    names = _data_sets(model)
    return f"The data ({', '.join(names)}) belong to their owners and are not part of the model." if names else ""
