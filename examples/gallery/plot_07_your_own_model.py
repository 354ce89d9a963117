"""Your own model
==============

A transformer that you wrote is read off the operators that it executes; nothing has to be declared. Here its answer
is certified against changes of all pixels, of one patch and of the brightness: the fewer numbers move, the farther
they may.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import holdfast


class Small(nn.Module):
    """Patches, one block with attention written out by hand, a mean and a head."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.head = nn.Linear(width, 3)
        self.heads = heads

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).mT
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head((x + self.mlp(x)).mean(1))


torch.manual_seed(0)
model = Small().eval()  # train it as you like; here its weights are random
image = torch.rand(1, 1, 8, 8)
label = int(model(image).argmax())

# %%
# First see whether it can be read, and how well the network agrees with the model.
print(holdfast.to_network(model, image).equality)

# %%
# Then certify. A radius is always the l2 norm of the image's change.
moves = {"all pixels": "pixels", "one patch": ("patch", (0, 0, 4, 4)), "brightness": "brightness"}
records = {
    what: holdfast.certify(model, [(image[0], label)], radii=[0.01], perturb=perturb, attack=True).records[0]
    for what, perturb in moves.items()
}

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
places = range(len(records))
axes.barh(
    places, [r.attack_radius for r in records.values()], height=0.6, color="lightgrey", label="the answer changes"
)
axes.barh(places, [r.radius for r in records.values()], height=0.4, label="proved: it does not")
axes.set_yticks(places, list(records))
axes.set(xlabel="l2 radius")
axes.legend()
plt.show()
