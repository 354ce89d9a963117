"""Trains the small Llama that comes with Holdfast on a text, and writes its files.

python examples/train_tiny_llama.py alice.txt

Half of every batch is shown with its embeddings moved: each in the direction in which the loss grows, by a fixed part
of its length. So answers do not depend on the last digits of a word, and the model is smooth enough to prove radii.
It needs transformers and takes a few minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast.models.tiny_llama import FOLDER, UNKNOWN, WORDS_FILE, split_words, word_ids

SEED, WORDS, CONTEXT, TEST = 0, 256, 16, 0.1
STEPS, BATCH, LEARNING_RATE, WEIGHT_DECAY, MOVED = 3000, 64, 3e-3, 1.0, 0.3
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}


def main() -> None:
    """Trains, measures the accuracy on the end of the text, writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--moved", type=float, default=MOVED, help="how far embeddings move, in their own lengths")
    parser.add_argument("--decay", type=float, default=WEIGHT_DECAY, help="of the weights")
    parser.add_argument("--out", type=Path, default=FOLDER)
    asked = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the model is too small for more, and the sums keep their order
    words = split_words(asked.text.read_text(encoding="utf-8"))
    known = ["<unknown>", *(word for word, _ in Counter(words).most_common(WORDS - 1))]
    ids = word_ids(words, known)
    cut = int(len(ids) * (1 - TEST))
    config = LlamaConfig(**SIZES, vocab_size=WORDS, tie_word_embeddings=True, pad_token_id=UNKNOWN)
    model = LlamaForCausalLM(config)
    began = time.process_time()
    train(model, ids[:cut], asked.steps, asked.moved, asked.decay)
    right, loss = measured(model.eval(), ids[cut:])
    spent = time.process_time() - began
    print(f"{right:.1%} of known words, perplexity {loss.exp():.1f}, {spent:.0f} s of processor time")
    model.save_pretrained(asked.out)
    (asked.out / "generation_config.json").unlink(missing_ok=True)
    (asked.out / WORDS_FILE).write_text("\n".join(known) + "\n", encoding="utf-8")


def train(model: LlamaForCausalLM, ids: Tensor, steps: int, moved: float, decay: float) -> None:
    """A fixed number of steps; the last weights are kept."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    windows = ids.unfold(0, CONTEXT + 1, 1)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        x = model.get_input_embeddings()(batch[:, :-1])
        half = BATCH // 2
        away = torch.zeros_like(x)
        away[:half] = worst(model, x[:half].detach(), batch[:half, 1:], moved)
        loss = losses(model, x + away, batch[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()


def worst(model: LlamaForCausalLM, x: Tensor, after: Tensor, moved: float) -> Tensor:
    """How embeddings move where the loss grows fastest, each by a part of its length."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(losses(model, x, after), x)
    return (moved * x.norm(dim=-1, keepdim=True) * nn.functional.normalize(slope, dim=-1, eps=1e-30)).detach()


def losses(model: LlamaForCausalLM, x: Tensor, after: Tensor) -> Tensor:
    """The mean over known words of -log of the probability that the model gives them."""
    logits = model(inputs_embeds=x).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), after.flatten(), ignore_index=UNKNOWN)


@torch.no_grad()
def measured(model: LlamaForCausalLM, ids: Tensor) -> tuple[float, Tensor]:
    """How often the next word is the one with the largest logit, and the mean loss, among known words."""
    windows = ids.unfold(0, CONTEXT + 1, 1)
    windows = windows[windows[:, -1] != UNKNOWN]
    logits = model(windows[:, :-1]).logits[:, -1]
    right = (logits.argmax(-1) == windows[:, -1]).float().mean()
    return float(right), nn.functional.cross_entropy(logits, windows[:, -1])


if __name__ == "__main__":
    main()
