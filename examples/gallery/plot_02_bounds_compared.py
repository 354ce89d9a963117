"""Bounds compared
===============

All bounds of ``holdfast.list_bounds()`` over a ball around x, divided by what an attack attains: 1 is the truth.
Which one is smallest depends on the radius, and ``best`` tries them all.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

generator = torch.Generator().manual_seed(0)


def weight(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return 2 * drawn / torch.linalg.matrix_norm(drawn, 2)[:, None, None]


h, n, d, k = 2, 6, 8, 4
layer = holdfast.AttentionLayer(weight(h, d, k), weight(h, d, k), weight(h, d, k), weight(h, k, d), residual=1.0)
x = torch.nn.functional.normalize(torch.randn(n, d, generator=generator, dtype=torch.float64), dim=-1)

# %%
# The guarantee "numerical" takes the same formulas with iterated norms, which is quicker and good enough for a
# figure.
eps = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
attained = holdfast.attack(layer, x, eps=eps).lower
names = [bound.name for bound in holdfast.list_bounds() if bound.scope == "ball at x"]

figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
for name in names:
    ratio = holdfast.bound(layer, x, eps=eps, method=name, guarantee="numerical").value / attained
    best = name == "best"
    axes.loglog(
        eps, ratio, label=name, color="black" if best else None, linestyle="--" if best else "-", zorder=2 + best
    )
axes.set(xlabel="eps", ylabel="bound / attack")
axes.legend(ncols=2)
plt.show()

# %%
# Which one won at each radius:
print(holdfast.bound(layer, x, eps=eps, guarantee="numerical").notes)
