"""The layers of somebody else's model
===================================

``holdfast.trace`` runs an unmodified model once and gives every self-attention as an ``AttentionLayer`` at its real
input. The model here is a GPT-2 of Hugging Face with random weights; with trained ones the picture differs from
layer to layer.
"""

import matplotlib.pyplot as plt
import torch
from transformers import GPT2Config, GPT2Model

import holdfast

torch.manual_seed(0)
config = GPT2Config(n_layer=6, n_head=4, n_embd=64, vocab_size=500, bos_token_id=0, eos_token_id=0)
model = GPT2Model(config).eval()
ids = torch.randint(500, (1, 24))
layers = holdfast.trace(model, {"input_ids": ids})
for each in layers:
    print(each.name, tuple(each.x.shape), f"rebuilt to {each.rebuild_error:.0e}")

# %%
# ``analyze`` does the rest for all of them: local constants, bounds, an attack. It also writes a page,
# ``.to_html(path)``.
found = holdfast.analyze(model, {"input_ids": ids}, eps=[0.01])
depth = range(len(found.layers))
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.plot(depth, [layer.slope[0] for layer in found.layers], label="slope at x")
axes.plot(depth, [layer.bound[0][0] / 0.01 for layer in found.layers], "v", label="bound / eps")
axes.plot(depth, [layer.attack[0][0] / 0.01 for layer in found.layers], "^", label="attack / eps")
axes.set(xlabel="layer", ylabel="movement of the output / eps, at eps = 0.01", ylim=(0, None))
axes.legend()
plt.show()
