"""Trains the vision transformer that comes with Holdfast and writes its two files.

Run it from anywhere as `python examples/train_digits_vit.py`; it needs scikit-learn.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors.torch import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from holdfast.data.digits import CLASSES, DIGITS_FILE, MAX_PIXEL, SIDE
from holdfast.models.digits import WEIGHTS_FILE, DigitsViT

SEED = 0
TEST_SIZE = 360
BUNDLED = 32
EPOCHS = 200
BATCH = 64
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.3
COMMAND = "python examples/train_digits_vit.py"


def shifted(images: Tensor) -> Tensor:
    """Moves about half of the images by up to one pixel along each axis and fills with background."""
    windows = nn.functional.pad(images, (1, 1, 1, 1)).unfold(1, SIDE, 1).unfold(2, SIDE, 1)
    down, right = torch.randint(3, (2, len(images)))
    moved = windows[torch.arange(len(images)), down, right]
    # Digits touch the top and bottom edges, so a shift cuts them: half of them stay whole.
    return torch.where(torch.rand(len(images), 1, 1) < 0.5, moved, images)


def train(images: Tensor, labels: Tensor) -> DigitsViT:
    """Trains for a fixed number of epochs and keeps the last weights: nothing is chosen by test accuracy."""
    model = DigitsViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * -(-len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(images)), BATCH):
            loss = nn.functional.cross_entropy(model(shifted(images[batch])), labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval()


def balanced(labels: Tensor, count: int) -> Tensor:
    """Returns `count` positions that go round the classes: the first 0, 1, ..., 9, then the second 0, ..."""
    one_hot = nn.functional.one_hot(labels, CLASSES)
    rank = one_hot.cumsum(0).gather(1, labels[:, None]).squeeze(1)
    return torch.argsort(rank * CLASSES + labels)[:count]


def write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes the whole file or leaves the old one as it was."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(save(tensors, metadata))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    """Trains, measures test accuracy, writes the weights and the bundled digits."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the model is too small for more, and the sums keep their order
    data = load_digits()
    pixels = torch.from_numpy(data.images).to(torch.uint8)
    labels = torch.from_numpy(data.target).long()
    images = pixels.float() / MAX_PIXEL
    splits = train_test_split(range(len(labels)), test_size=TEST_SIZE, random_state=SEED, stratify=labels)
    train_indices, test_indices = map(torch.tensor, splits)

    start = time.perf_counter()
    model = train(images[train_indices], labels[train_indices])
    seconds = time.perf_counter() - start
    with torch.no_grad():
        correct = model(images[test_indices]).argmax(1) == labels[test_indices]
    accuracy = correct.float().mean().item()
    print(f"test accuracy {accuracy:.2%} on {TEST_SIZE} images, trained in {seconds:.0f} s")

    metadata = {"test_accuracy": f"{accuracy:.4f}", "seed": str(SEED), "command": COMMAND}
    shown = test_indices[balanced(labels[test_indices], BUNDLED)]
    digits = {"images": pixels[shown], "labels": labels[shown], "indices": shown}
    write(model.state_dict(), WEIGHTS_FILE, metadata)
    write(digits, DIGITS_FILE, metadata)


if __name__ == "__main__":
    main()
