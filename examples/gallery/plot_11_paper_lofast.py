"""The LoFAST paper at one layer
=============================

Havens et al. (2024) split the movement of an attention layer's output into what the values do under the old
attention, Δ₁, and what the new attention does, Δ₂, and bound both. Here are the parts of their Theorem 1 at a small
random layer, beside what an attack attains, and beside our own bound. ``holdfast repro lofast-fig1`` does the same at
a trained layer.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(16, 2).double().eval()
layer = holdfast.AttentionLayer.from_module(attention)
x = torch.randn(8, 16, dtype=torch.float64)
eps = [0.02 * step for step in range(1, 11)]

# %%
# The paper's claim is an inequality, so it is tried: no attack may go beyond it.
theorem = holdfast.bound(layer, x, eps, "lofast", guarantee="numerical")
ours = holdfast.bound(layer, x, eps, "best", guarantee="numerical")
attained = holdfast.attack(layer, x, eps, restarts=2, steps=20).lower
assert (attained <= ours.value).all()
assert (ours.value <= theorem.value).all()

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.plot(eps, theorem.value, label="Theorem 1")
axes.plot(eps, theorem.terms["delta_1"], "--", label="its Δ₁ = ζ(X) ε")
axes.plot(eps, theorem.value - theorem.terms["delta_1"], ":", label="the rest of it")
axes.plot(eps, ours.value, label="our bound")
axes.plot(eps, attained, "o", color="black", label="attained")
axes.set(xlabel="ε", ylabel="movement of the output")
axes.legend()
plt.show()

# %%
# The paper's section 5.1 says that the bound of Δ₂ is quadratic in ε, and so negligible for small ones. It is linear
# to first order: its share does not vanish with ε.
share = 1 - theorem.terms["delta_1"] / theorem.value
print(f"share of Δ₂ in the bound: {share[0]:.2f} at ε = {eps[0]:.2f}, {share[-1]:.2f} at ε = {eps[-1]:.2f}")
