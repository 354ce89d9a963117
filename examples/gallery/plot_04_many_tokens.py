"""More tokens, steeper attention
==============================

Over all inputs whose tokens have length at most R the Lipschitz constant of attention grows like √n with the number
of tokens, and no faster. Explicit configurations of tokens attain that growth: one token tips the balance for all
the others.
"""

import matplotlib.pyplot as plt
import torch

import holdfast

d = 4
identity = torch.eye(d, dtype=torch.float64)[None]
layer = holdfast.AttentionLayer(-identity, identity, identity, identity, scale=1.0)
radius, tokens = 2.0, [2, 4, 8, 16, 32, 64, 128]

proved = {
    method: [float(holdfast.lipschitz_bound(layer, radius=radius, tokens=n, method=method).value) for n in tokens]
    for method in ("castin-ball", "castin-sharp", "mean-field")
}
found = [holdfast.lipschitz_attack(layer, radius=radius, tokens=n, restarts=2, steps=20) for n in tokens]

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for method, values in proved.items():
    axes.loglog(tokens, values, label=method)
axes.loglog(tokens, [float(f.lower) for f in found], "o", color="black", label="attained by a witness")
axes.set(xlabel="tokens n", ylabel=f"Lipschitz constant for tokens of length ≤ {radius:g}")
axes.legend()
plt.show()

# %%
# ``mean-field`` holds for every number of tokens, and so does not grow; it begins to pay where √n has passed it.
# Every witness comes with the direction in which the layer is steep there, and says where it comes from:
print(found[-1].origin, tuple(found[-1].witness.shape), float(found[-1].lower))
