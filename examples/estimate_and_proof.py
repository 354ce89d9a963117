"""Compares estimates in training with what is proved: radii of test images by slopes of the loss and by `certify`.

Run: python examples/estimate_and_proof.py [cifar10-best] [--inputs 16] [--sharpen 3]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import holdfast
from holdfast.data import load as load_data
from holdfast.models import Transformer
from holdfast.models.files import load_transformer
from holdfast.train.forward import run
from holdfast.train.slopes import GainsSlope

LARGEST, HALVINGS = 2.0, 14  # of the radii among which the estimated one is looked for


def estimated(model: Transformer, image: Tensor, label: Tensor, over_ball: bool) -> float:
    """The largest radius at which the estimate lets no margin fall to 0."""
    found = run(model, image.unsqueeze(0), label.unsqueeze(0))
    low, high = 0.0, LARGEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        falls = middle * GainsSlope(radius=middle if over_ball else 0.0)(found)
        left = (found.margins - falls).scatter(1, found.labels.unsqueeze(1), torch.inf).amin()
        low, high = (middle, high) if left > 0 else (low, middle)
    return low


def say(name: str, proved: Tensor, guessed: Tensor) -> None:
    """How the proved radii compare with estimated ones."""
    ratio = proved / guessed
    print(
        f"{name}: proved / estimated {ratio.min():.2f} to {ratio.max():.2f}, mean {ratio.mean():.2f}, "
        f"deviation {ratio.std():.2f}"
    )


@torch.no_grad()
def main() -> None:
    """Certifies, estimates, compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="cifar10-best", help="a model on the shelf, or a file of train")
    parser.add_argument("--inputs", type=int, default=16)
    parser.add_argument("--sharpen", type=float, default=1.0, help="multiplies the queries of the first attention")
    chosen = parser.parse_args()
    model = load_transformer(chosen.model)
    model.attentions[0].query.weight.mul_(chosen.sharpen)
    data = load_data("cifar10").select(torch.arange(chosen.inputs))
    records = holdfast.certify(model, data, [36 / 255], method="gains").records
    proved = torch.tensor([record.radius for record in records])
    answers = torch.tensor([record.prediction for record in records])
    for name, over_ball in (("at the input", False), ("over the ball", True)):
        pairs = zip(data.inputs, answers, strict=True)
        say(name, proved, torch.tensor([estimated(model, x, y, over_ball) for x, y in pairs]))


if __name__ == "__main__":
    main()
