"""Shows where a certifiable model loses slope: the norm of the margins' gradient in front of each of its layers.

A network of gain 1 is proved with slope 1 everywhere, whatever its slope is. What the last line lacks to 1 is the room
that better layers, or better bounds, would have.

Run: python examples/gradient_norms.py [cifar10-best] [--inputs 200]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from holdfast.data import load as load_data
from holdfast.models import Transformer
from holdfast.models.files import load_transformer
from holdfast.train.forward import logits_of
from holdfast.train.gains import each_length


def slopes(model: Transformer, images: Tensor, labels: Tensor) -> list[tuple[str, Tensor]]:
    """For each layer, from last to first, the gradient of the smallest margin at its input, over ‖w_y - w_j‖."""
    layers = [*model.body, *model.pool]
    entering = [images.requires_grad_()]
    for layer in layers:
        entering.append(layer(entering[-1]))
    logits = logits_of(model, entering[-1])
    margins = logits.gather(1, labels.unsqueeze(1)) - logits
    smallest, rivals = margins.scatter(1, labels.unsqueeze(1), torch.inf).min(1)
    weights = model.head.weight.detach()
    apart = (weights[labels] - weights[rivals]).norm(dim=1)
    gradients = torch.autograd.grad(smallest.sum(), entering[:-1])
    named = zip((type(layer).__name__ for layer in layers), gradients, strict=True)
    return [(name, each_length(g).flatten() / apart) for name, g in reversed(list(named))]


def main() -> None:
    """Loads, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="cifar10-best", help="a model on the shelf, or a file of train")
    parser.add_argument("--inputs", type=int, default=200)
    chosen = parser.parse_args()
    model = load_transformer(chosen.model)
    data = load_data("cifar10").select(torch.arange(chosen.inputs))
    for name, slope in slopes(model, data.inputs, data.labels):
        print(f"{name.removeprefix('Parametrized'):12s} {slope.mean():.3f} ({slope.min():.3f} to {slope.max():.3f})")


if __name__ == "__main__":
    main()
