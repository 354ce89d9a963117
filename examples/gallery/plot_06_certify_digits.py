"""Certify a classifier
====================

A small vision transformer comes with the package. For each test digit we prove the radius within which no change of
the pixels changes the answer, and look for the nearest change that does. The true radius lies between the two.
"""

import matplotlib.pyplot as plt

import holdfast
from holdfast.models import demo_digits, load_digits_vit

model, digits = load_digits_vit(), demo_digits()
pairs = list(zip(digits.images, digits.labels.tolist(), strict=True))[:3]

# %%
# ``telescoped`` takes a few seconds per digit; ``best``, the default, tries the other compositions, too. LoFAST's
# recursion, for comparison, multiplies bounds from layer to layer.
run = holdfast.certify(model, pairs, radii=[0.05], method="telescoped", attack=True)
lofast = holdfast.certify(model, pairs, radii=[0.05], method="lofast")
print(f"at 0.05: {run.accuracy(0.05):.0%} proved, {run.attacked(0.05):.0%} stand after the attack")

# %%
# Bars: no change up to there changes the answer. Crosses: the nearest change found that does.
figure = plt.figure(figsize=(8, 4), layout="constrained")
places = figure.subplot_mosaic([[str(i), "radii"] for i in range(len(pairs))], width_ratios=(1, 4))
for i, (image, label) in enumerate(pairs):
    places[str(i)].imshow(image.squeeze(), cmap="gray_r")
    places[str(i)].set(xticks=[], yticks=[], ylabel=f"a {label}")
radii = places["radii"]
rows = range(len(pairs))
radii.barh(rows, [record.radius for record in run.records], height=0.5, label="telescoped: proved", color="tab:blue")
radii.barh(rows, [record.radius for record in lofast.records], height=0.5, label="lofast: proved", color="tab:orange")
radii.plot([record.attack_radius for record in run.records], rows, "kx", label="the answer changes")
radii.set(xscale="log", xlim=(1e-8, 1), xlabel="l2 radius, pixels in [0, 1]", yticks=[])
radii.invert_yaxis()
radii.legend(loc="lower left")
plt.show()
