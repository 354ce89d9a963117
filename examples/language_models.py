"""What a language model's attention is like on a text: steep layers and heads, sinks, bounds, and bits for a cache.

python examples/language_models.py smollm2 alice.txt --tokens 128
python examples/language_models.py minilm alice.txt --tokens 128 --cache
python examples/language_models.py smollm2 alice.txt --lengths 32 128 512 --every 12 --json cache-smollm2.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.models.loading import LoadedModel, load

EPS = 0.01
BITS = (2, 4, 6, 8, 10, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="minilm, smollm2, or what `holdfast analyze` takes")
    parser.add_argument("text", type=Path, help="a text file; its first tokens are taken")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--start", type=int, default=0, help="how many characters to skip")
    parser.add_argument("--cache", action="store_true", help="the table of bits instead of that of layers")
    parser.add_argument("--time", action="store_true", help="only how long the bounds of all layers take")
    parser.add_argument("--lengths", type=int, nargs="+", help="the cache at these many tokens, and norms beside it")
    parser.add_argument("--json", type=Path, help="file for the numbers of --lengths, with the command's options")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of a quantised cache")
    parser.add_argument("--every", type=int, default=1, help="take every n-th layer")
    asked = parser.parse_args()
    tokens = max(asked.lengths or [asked.tokens])
    words = asked.text.read_text(encoding="utf-8")[asked.start : asked.start + 40 * tokens]
    loaded = load(asked.model, text=[words], max_tokens=tokens)
    if asked.lengths:
        kinds = "actual, proved, norms, norms / proved"
        print(f"| tokens | layer | int8: {kinds} | int4: {kinds} |\n|---|---|---|---|")
        rows = list[dict[str, Any]]()
        for n in asked.lengths:
            rows += cache_at(loaded, n, asked.every)
            if asked.json:
                record = {"model": asked.model, "text": asked.text.name, "start": asked.start, "lengths": asked.lengths}
                record |= {"every": asked.every, "torch": torch.__version__, "threads": torch.get_num_threads()}
                record["rows"] = rows
                asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    traced = holdfast.trace(loaded.model, loaded.inputs)[:: asked.every]
    if asked.time:
        wall, processor = time.perf_counter(), time.process_time()
        for each in traced:
            bounded(each)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        print(f"{len(traced)} layers, {wall:.1f} s, {processor:.1f} s of processor time")
    elif asked.cache:
        cache(traced, asked.tolerance)
    else:
        layers(traced)


def bounded(each: holdfast.TracedLayer) -> torch.Tensor:
    return holdfast.bound(each.layer, each.x, EPS, "second-order", guarantee="numerical").value


def layers(traced: list[holdfast.TracedLayer]) -> None:
    """One line for each layer: steepness, sink, bound and attack."""
    print("| layer | slope | steepest head | sink's share | largest of a head | bound / attack |")
    print("|---|---|---|---|---|---|")
    for each in traced:
        layer, x = each.layer.double(), each.x.double()
        report = holdfast.attention_report(layer, x)
        shares = (report.value_share + report.query_share + report.key_share)[0]
        bound = bounded(each)
        attained = holdfast.attack(layer, x, EPS, restarts=1, steps=2).lower
        head, sinks = int(shares.argmax()), report.sink_share[0]
        print(
            f"| {each.name} | {float(report.slope[0]):.3g} | {head} ({float(shares[head]):.0%}) | "
            f"{float(sinks.mean()):.0%} | {float(sinks.max()):.0%} | {float(bound / attained):.3f} |",
            flush=True,
        )


def cache(traced: list[holdfast.TracedLayer], tolerance: float) -> None:
    """Relative movement of the worst token by bits: actual / attacked / proved, and the bits for the tolerance."""
    head = " | ".join(f"int{bits}: actual, proved" for bits in BITS)
    print(f"| layer | {head} | bits for {tolerance:g}: actual, proved |\n|---|" + "---|" * (len(BITS) + 1))
    for each in traced:
        with torch.no_grad():
            table = holdfast.cache_bits({each.name: (each.layer, each.x)}, tolerance, BITS)
        (row,) = table.layers
        cells = " | ".join(f"{row.movement[b][0]:.2g}, {row.movement[b][2]:.2g}" for b in BITS)
        print(f"| {row.name} | {cells} | {row.actual or 'more'}, {row.proved or 'more'} |", flush=True)


def cache_at(loaded: LoadedModel, n: int, every: int) -> list[dict[str, Any]]:
    """Relative movement of the worst token of n with a cache in 8 and in 4 bits, and what norms alone would prove."""
    assert isinstance(loaded.inputs, dict)
    inputs = {name: t[:, :n] for name, t in loaded.inputs.items()}
    rows = []
    for index, each in list(enumerate(holdfast.trace(loaded.model, inputs)))[::every]:
        row: dict[str, Any] = {"tokens": n, "layer": index}
        for bits in ("int8", "int4"):
            r = holdfast.cache_error(each.layer, each.x, bits, bits, attack=False)
            assert r.moved is not None
            size = r.size.median()
            row[bits] = {
                "actual": float(r.moved.max() / size),
                "proved": float(r.value.max() / size),
                "norms": float(r.norms.max() / size),
                "median norms / proved": float((r.norms / r.value).median()),
                "seconds": r.seconds,
            }
        rows.append(row)
        cells = (
            f"{c['actual']:.2g}, {c['proved']:.2g}, {c['norms']:.2g}, {c['median norms / proved']:.1f}"
            for c in (row["int8"], row["int4"])
        )
        print(f"| {n} | {index} | {' | '.join(cells)} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
