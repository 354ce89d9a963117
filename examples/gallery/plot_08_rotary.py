"""Rotary positions
================

Rotary positions turn queries and keys by angles that grow with the token's place. Every bound over a ball holds for
them. The layer below has the same weights with and without; what changes is where it is steep.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(0)
n, d, k = 12, 16, 8
weights = [torch.randn(2, d, k, dtype=torch.float64) / 2 for _ in range(3)] + [
    torch.randn(2, k, d, dtype=torch.float64) / 2
]
angles = torch.arange(n, dtype=torch.float64)[:, None] * 100.0 ** -torch.linspace(0, 1, k // 2, dtype=torch.float64)
angles = torch.cat([angles, angles], dim=-1)
rotary = holdfast.Rotary(angles.cos(), angles.sin())
plain = holdfast.AttentionLayer(*weights, causal=True)
layers = {"no positions": plain, "rotary positions": plain.replace(rotary=rotary)}
x = torch.randn(n, d, dtype=torch.float64)

# %%
# Bounds and attacks as for any other layer:
eps = [0.01, 0.03, 0.1, 0.3, 1.0]
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, layer in layers.items():
    proved = holdfast.bound(layer, x, eps=eps, method="second-order", guarantee="numerical")
    found = holdfast.attack(layer, x, eps=eps)
    assert (found.lower <= proved.value).all()
    (line,) = axes.loglog(eps, proved.value, label=f"{name}: bound")
    axes.loglog(eps, found.lower, "o", color=line.get_color(), label=f"{name}: attack")
axes.set(xlabel="eps", ylabel="how far the output moves")
axes.legend()
plt.show()

# %%
# Where the last token attends, in the first head:
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for name, layer in layers.items():
    axes.plot(layer.attention(x)[0, -1], marker="o", label=name)
axes.set(xlabel="key", ylabel="probability, last query, first head")
axes.legend()
plt.show()
