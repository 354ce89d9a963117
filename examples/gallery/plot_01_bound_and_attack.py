"""A bound and an attack
=====================

An attack shows how far the output of an attention layer *does* move, a bound how far it *can*. The truth lies
between them: the two curves leave little room for it.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(32, 4).double().eval()
layer = holdfast.AttentionLayer.from_module(attention, residual=1.0)
x = torch.randn(8, 32, dtype=torch.float64)

# %%
# Every radius at once: ``eps`` may be a sequence. The bound is proved in floating point; the attack returns its
# witness.
eps = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
proved = holdfast.bound(layer, x, eps=eps)
found = holdfast.attack(layer, x, eps=eps)
assert (found.lower <= proved.value).all()

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.fill_between(eps, found.lower, proved.value, alpha=0.3, label="the truth is in here")
axes.loglog(eps, proved.value, marker="o", label="no X' within eps moves it farther")
axes.loglog(eps, found.lower, marker="o", label="some X' within eps moves it this far")
axes.set(xlabel="eps: how far the input may move", ylabel="how far the output moves")
axes.legend()
plt.show()

# %%
# The slope at x is what both become for small eps.
slope = holdfast.local_lipschitz(layer, x, side="upper")
print(
    f"slope {slope.value:.4f}; bound / eps {proved.value[0] / eps[0]:.4f}; attack / eps {found.lower[0] / eps[0]:.4f}"
)
