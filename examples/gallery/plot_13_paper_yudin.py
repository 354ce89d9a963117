"""The softmax paper at one layer
==============================

Yudin et al. (2025) bound attention's Jacobian with g₁, a closed form above the norm of a softmax's Jacobian. What the
bound costs at a random layer depends on how peaked its attention is; the bounds ``yudin-b2`` and ``yudin-b3`` keep
more of the layer, and ``jacobian`` is the norm itself, proved.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(0)
w_q, w_k, w_v = (torch.randn(2, 16, 8, dtype=torch.float64) / 4 for _ in range(3))
w_o = torch.randn(2, 8, 16, dtype=torch.float64) / 4
x = torch.randn(8, 16, dtype=torch.float64)
sharpness = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
methods = ("yudin", "yudin-b2", "yudin-b3", "jacobian")

values: dict[str, list[float]] = {method: [] for method in methods}
for s in sharpness:
    layer = holdfast.AttentionLayer(s * w_q, w_k, w_v, w_o)
    for method in methods:
        values[method].append(float(holdfast.lipschitz_bound(layer, x, method=method).value))
assert all(wide >= norm for wide, norm in zip(values["yudin"], values["jacobian"], strict=True))

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for method, style in zip(methods, ("--", "-.", ":", "-"), strict=True):
    axes.loglog(sharpness, values[method], style, label=method)
axes.set(xlabel="factor on the scores", ylabel="norm of the layer's Jacobian")
axes.legend()
plt.show()

# %%
# The penalty that the paper proposes, JaSMin, is log g₁ of the worst row, or log(g₁ / g_k): a row that attends to one
# key pays little, a row between two keys most.
p = torch.tensor([[0.97, 0.02, 0.01], [0.5, 0.49, 0.01], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
for row, g in zip(p.tolist(), holdfast.g_k(p, 1).tolist(), strict=True):
    print(", ".join(f"{entry:.2f}" for entry in row), f"  g₁ = {g:.3f}")
