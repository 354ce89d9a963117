"""A cache of keys and values in few bits
======================================

Language models keep keys and values in few bits. How far can that move a layer's output? The bound holds for
*every* cache within half a step of the true one, the attack finds a bad one, and the quantiser itself does less
harm than either.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(0)
attention = torch.nn.MultiheadAttention(64, 4).double().eval()
layer = holdfast.AttentionLayer.from_module(attention).replace(causal=True)
x = torch.randn(24, 64, dtype=torch.float64)

# %%
# One number for each token; the figure shows the largest, as a share of the output's length there.
bits = [2, 3, 4, 5, 6, 8]
results = [
    holdfast.cache_error(layer, x, keys=holdfast.Quantiser(b), values=holdfast.Quantiser(b, per="token")) for b in bits
]


def share(moved: torch.Tensor) -> float:
    return float((moved / layer(x).norm(dim=-1)).max())


figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.semilogy(bits, [share(r.norms) for r in results], ":", label="proved by norms alone")
axes.semilogy(bits, [share(r.value) for r in results], marker="o", label="proved for every cache")
axes.semilogy(bits, [share(r.lower) for r in results], marker="o", label="attained by a cache")
axes.semilogy(bits, [share(r.moved) for r in results], marker="o", label="what this quantiser does")
axes.set(xlabel="bits for a number", ylabel="movement / length of the output")
axes.legend()
plt.show()
