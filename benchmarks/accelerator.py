"""What a GPU takes: bounds of layers of real sizes beside the attack, their caches, a shelf model certified by `gains`.

python -m benchmarks.accelerator [FILE]. Layers have the shapes of MiniLM's and SmolLM2's, random weights; images are
random, with the model's own answers as labels. Without a GPU sizes are small, and nothing is written.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import holdfast
from benchmarks.gpu import counted, second_call
from holdfast.attention import Rotary
from holdfast.models import load
from holdfast.storage import write_text

EPS = 0.01
TOKENS = {"numerical": 128, "proved": 16}  # a proved second-order bound holds a matrix of (n d)² numbers
LENGTHS, BITS = (128, 512), ("int8", "int4")  # of a cache
IMAGES, BATCH = 400, 200


def run(out: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = device == "cpu"
    rows = []
    for work in (_bounds, _caches, _certified):
        for row in work(device, small):
            Console(width=140).print(row)
            rows.append(row)
    if not small:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        write_text(out, json.dumps({"machine": where, "eps": EPS, "rows": rows}, indent=1) + "\n")


def _bounds(device: str, small: bool) -> Iterator[dict[str, Any]]:
    for guarantee, method in (("numerical", "second-order"), ("proved", "rows"), ("proved", "second-order")):
        tokens = TOKENS["proved" if method == "second-order" and guarantee == "proved" else "numerical"]
        for name, (layer, x) in _layers(tokens // 8 if small else tokens, device).items():
            witness, attacking, _ = second_call(partial(holdfast.attack, layer, x, EPS, restarts=1, steps=2))
            work = partial(holdfast.bound, layer, x, EPS, method, guarantee=guarantee)
            bound, seconds, gigabytes = second_call(work)
            yield {
                "work": f"{method}, {guarantee}",
                "layer": name,
                "tokens": len(x),
                "seconds": seconds,
                "attack seconds": attacking,
                "GiB": gigabytes,
                "ratio to the attack": float(bound.value / witness.lower),
                **counted(work),
            }


def _caches(device: str, small: bool) -> Iterator[dict[str, Any]]:
    """How far a cache in few bits can move the output: proved alone, and with the search for a bad one beside it."""
    for tokens, bits in product(LENGTHS, BITS):
        for name, (layer, x) in _layers(tokens // 8 if small else tokens, device).items():
            work = partial(holdfast.cache_error, layer, x, bits, bits)
            error, seconds, gigabytes = second_call(partial(work, attack=False))
            attacked, in_all, _ = second_call(work)
            size = error.size.median()
            yield {
                "work": f"cache_error, {bits}",
                "layer": name,
                "tokens": len(x),
                "seconds": seconds,
                "seconds with the attack": in_all,
                "GiB": gigabytes,
                "proved": float(error.value.max() / size),
                "attack": float(attacked.lower.max() / size),
                "median norms / proved": float((error.norms / error.value).median()),
            }


def _layers(tokens: int, device: str) -> dict[str, tuple[holdfast.AttentionLayer, torch.Tensor]]:
    """Scores are of about the size 1.5², so that attention is neither flat nor peaked."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    layers = {}
    for name, d, h, g in (("MiniLM", 384, 12, 12), ("SmolLM2", 576, 9, 3)):
        k, spread = d // h, 1.5 / d**0.5
        maps = [normal(heads, d, k) * spread for heads in (h, g, g)]
        if name == "MiniLM":
            options: dict[str, Any] = {"b_q": normal(h, k), "b_k": normal(g, k), "b_v": normal(g, k), "b_o": normal(d)}
        else:
            frequencies = 10000.0 ** (-torch.arange(k // 2).double() * 2 / k)
            angles = (torch.arange(tokens).double()[:, None] * frequencies).repeat(1, 2)
            options = {"causal": True, "rotary": Rotary(angles.cos(), angles.sin())}
        layer = holdfast.AttentionLayer(*maps, normal(h, k, d) / d**0.5, **options)
        layers[name] = layer.to(device), normal(tokens, d).to(device)
    return layers


def _certified(device: str, small: bool) -> Iterator[dict[str, Any]]:
    model, images = load("cifar10-best"), 2 if small else IMAGES
    x = torch.rand(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = torch.cat([model(part) for part in x.split(100)]).argmax(-1)
    for batch in (min(BATCH, images), None):
        began = time.perf_counter()
        holdfast.certify(model, (x, y), [36 / 255], "gains", batch=batch, device=device, progress=False)
        seconds = time.perf_counter() - began
        size = "auto" if batch is None else str(batch)
        yield {"work": "cifar10-best by gains", "batch": size, "images": images, "seconds": seconds}


if __name__ == "__main__":
    run(Path(sys.argv[1] if len(sys.argv) > 1 else "results/benchmarks/accelerator.json"))
