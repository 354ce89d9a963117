"""How sensitive is a softmax?
===========================

The Jacobian of softmax at a row of probabilities p is diag(p) - ppᵀ. Its norm is at most ½, and 0 for a row that
looks at one key alone. Two closed forms bound it: g₁ = p₁(1 - p₁ + p₂) of the two largest entries, and u₂ of the
three largest.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

# %%
# Random scores of 16 keys, sharpened step by step: from uniform attention to a single key.
torch.manual_seed(0)
scores = torch.randn(16, dtype=torch.float64)
sharpness = torch.logspace(-1.5, 2, 200, dtype=torch.float64)
p = (sharpness[:, None] * scores).softmax(-1)

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for method, style in {"u2": ":", "g1": "--", "exact": "-", "lower": "-."}.items():
    axes.plot(p.amax(-1), holdfast.softmax_jacobian_norm(p, method=method), style, label=method)
axes.set(xlabel="largest probability", ylabel="norm of the Jacobian")
axes.legend()
plt.show()

# %%
# The further eigenvalues have bounds of the same kind, g_k = p_k(1 - p_k + p_{k+1}). JaSMin, a penalty for training,
# is made of them.
eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).flip(-1)
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for k in (1, 2, 3):
    (line,) = axes.plot(p.amax(-1), holdfast.g_k(p, k), "--", label=f"g_{k}")
    axes.plot(p.amax(-1), eigenvalues[:, k - 1], color=line.get_color(), label=f"eigenvalue {k}")
    assert (eigenvalues[:, k - 1] <= holdfast.g_k(p, k) + 1e-12).all()
axes.set(xlabel="largest probability", ylabel="eigenvalues of the Jacobian, and their bounds")
axes.legend()
plt.show()
