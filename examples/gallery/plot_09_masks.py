"""Masks: who may look at whom
===========================

A mask removes pairs of tokens, and a bound that takes it into account counts only the others. Full, causal and windowed
attention with the same weights: the slope at x, and the token that the steepest direction moves.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

torch.manual_seed(1)
n = 16
attention = torch.nn.MultiheadAttention(32, 4).double().eval()
full = holdfast.AttentionLayer.from_module(attention)
x = 3 * torch.randn(n, 32, dtype=torch.float64)
place = torch.arange(n)
window = (place[:, None] - place).abs() <= 2
layers = {"full": full, "causal": full.replace(causal=True), "window of 5": full.replace(mask=window)}

figure, axes = plt.subplots(2, 3, figsize=(9, 5), layout="constrained", height_ratios=(3, 1))
for (picture, bars), (name, layer) in zip(axes.T, layers.items(), strict=True):
    slope = holdfast.local_lipschitz(layer, x)
    report = holdfast.attention_report(layer, x)
    picture.imshow(layer.attention(x)[0], cmap="Blues", vmin=0)
    picture.set(title=f"{name}: slope {float(slope.value):.3f}", xlabel="key", ylabel="query")
    bars.bar(place, slope.right.square().sum(-1))
    bars.set(xlabel="token", ylim=(0, 1))
    print(f"{name}: the first head's sink is token {int(report.sink[0])}")
axes[1, 0].set_ylabel("share")
plt.show()
