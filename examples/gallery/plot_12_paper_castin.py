"""The paper on smoothness, and its mask
=====================================

Castin et al. (2024) bound the Lipschitz constant of attention for any number of tokens in a ball (the mean-field
regime). For causal attention their constant cannot hold: with A = 0 every token becomes the mean of those before it,
the constant says 1, and the norm of this map grows towards 2, which is Hardy's inequality. With Hardy's factor it
holds.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

# %%
# The matrix of running means, and its norm.
tokens = [1, 2, 5, 10, 20, 50, 100, 200, 500]
norms = []
for n in tokens:
    means = torch.tril(torch.ones(n, n, dtype=torch.float64)) / torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    norms.append(float(torch.linalg.matrix_norm(means, 2)))

# %%
# A head whose scores are all zero: the constants of a ball of radius 1, which no number of tokens changes.
identity = torch.eye(2, dtype=torch.float64)[None]
head = holdfast.AttentionLayer(0 * identity, identity, identity, identity, scale=1.0)
causal = holdfast.AttentionLayer(0 * identity, identity, identity, identity, scale=1.0, causal=True)
open_constant = float(holdfast.lipschitz_bound(head, radius=1.0, tokens=500, method="mean-field").value)
with_hardy = float(holdfast.lipschitz_bound(causal, radius=1.0, tokens=500, method="mean-field-masked").value)
assert max(norms) <= with_hardy

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.semilogx(tokens, norms, "o-", color="black", label="causal attention, A = 0")
axes.axhline(open_constant, linestyle="--", label="constant without a mask")
axes.axhline(with_hardy, linestyle=":", label="with Hardy's factor")
axes.set(xlabel="tokens n", ylabel="Lipschitz constant", ylim=(0, None))
axes.legend()
plt.show()
