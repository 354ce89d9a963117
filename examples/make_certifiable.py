"""Fine-tunes a trained vision transformer so that larger radii can be proved, without changing any layer.

Each image is shown twice, the second time with a small random change. The loss penalises how far the change moves
what enters LayerNorm (relative to the token's length), softmax (the scores) and GELU (the pre-activations): the curved
parts of the network. Run: python examples/make_certifiable.py [--steps 2000] [--weight 0.05]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import holdfast
from holdfast.data import load
from holdfast.models import load_digits_vit

TEMPERATURE, LENGTH = 4.0, 0.5  # of the loss; of the random change
SCORES, TOKENS, UNITS = 30.0, 3.0, 0.03  # what each kind of movement costs


class Movement:
    """How far a change of the input moves what enters the curved parts of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._costs: list[Tensor] = []
        watched = {nn.LayerNorm: self._layer_norm, nn.GELU: self._gelu, nn.MultiheadAttention: self._attention}
        self._hooks = [m.register_forward_hook(watched[type(m)]) for m in model.modules() if type(m) in watched]

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the images, and the mean cost of one random change of each."""
        change = torch.randn_like(images)
        change *= LENGTH / change.flatten(1).norm(dim=1).view(-1, *[1] * (images.ndim - 1))
        self._costs.clear()
        logits = self.model(torch.cat([images, images + change]))[: len(images)]
        return logits, sum(self._costs, torch.zeros(())) / LENGTH**2

    def stop(self) -> None:
        """Leaves the model as it was found."""
        for hook in self._hooks:
            hook.remove()

    def _layer_norm(self, module: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        before, after = inputs[0].chunk(2)
        moved = _centred(after - before) / before.std(-1, keepdim=True)
        self._costs.append(TOKENS * moved.square().mean(-1).sum(-1).mean())

    def _gelu(self, module: nn.Module, inputs: tuple[Tensor], _: Tensor) -> None:
        before, after = inputs[0].chunk(2)
        self._costs.append(UNITS * (after - before).square().sum((-1, -2)).mean())

    def _attention(self, module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], _: object) -> None:
        q, k, _v = nn.functional.linear(inputs[0], module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        q, k = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k))
        before, after = (q @ k.mT / q.shape[-1] ** 0.5).chunk(2)
        self._costs.append(SCORES * _centred(after - before).square().mean(-1).sum((-1, -2)).mean())


def _centred(moved: Tensor) -> Tensor:
    return moved - moved.mean(-1, keepdim=True)


def fine_tune(model: nn.Module, images: Tensor, labels: Tensor, steps: int, weight: float) -> None:
    movement = Movement(model.train().requires_grad_(True))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        pick = torch.randint(len(images), (64,))
        logits, cost = movement(images[pick])
        growing = weight * min(1.0, step / (0.3 * steps))
        loss = nn.functional.cross_entropy(TEMPERATURE * logits, labels[pick]) + growing * cost
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    movement.stop()
    model.eval()


def report(name: str, model: nn.Module, images: Tensor, labels: Tensor, inputs: int) -> None:
    pairs = list(zip(images, labels.tolist(), strict=True))[:inputs]
    run = holdfast.certify(model, pairs, radii=[0.05], method="telescoped", attack=True)
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == labels).double().mean()
    radius = torch.tensor([record.radius for record in run.records]).median()
    nearest = torch.tensor([record.attack_radius for record in run.records]).median()
    print(f"{name}: test accuracy {accuracy:.1%}, median proved radius {radius:.3f}, attack {nearest:.3f}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--weight", type=float, default=0.05)
    options.add_argument("--inputs", type=int, default=4, help="test digits to certify")
    chosen = options.parse_args()
    torch.manual_seed(0)
    train, test = load("digits", "train"), load("digits", "test")  # the split that the model was trained with
    model = load_digits_vit()
    report("before", model, test.inputs, test.labels, chosen.inputs)
    fine_tune(model, train.inputs, train.labels, chosen.steps, chosen.weight)
    report("after", model, test.inputs, test.labels, chosen.inputs)


if __name__ == "__main__":
    main()
