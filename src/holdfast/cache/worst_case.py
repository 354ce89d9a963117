"""The exact worst case of a mean under softmax over a box of scores: a sort (docs/math/cache.md)."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg.rounding import FLOOR, UNIT, power_of_two

_BLOCK = {"cpu": 2**18, "cuda": 2**27}  # numbers of one temporary: what a cache holds, or what keeps a GPU busy


def largest_means(
    scores: Float64[Tensor, "*b n m"], apart: Float64[Tensor, "*b n m"], values: Float64[Tensor, "*b m c"]
) -> Float64[Tensor, "*b n c"]:
    """The largest Σ_j p_j values_j over all scores within `apart` of the given ones, rounded up.

    Σ_j w_j a_j / Σ_j w_j is monotone in every w_j, so it is largest at a vertex of the box: keys whose value is above
    it have their largest weight, the others their least. Sorted by value, that is a cut, and every cut is tried.
    Values are first divided by a power of two, so that no product with a weight that counts underflows.

    Args:
        scores: -inf where masked.
        apart: half the width of the box, not negative.
        values: a_j for every coordinate c, exact numbers.
    """
    batch, (n, m), c = scores.shape[:-2], scores.shape[-2:], values.shape[-1]
    scale = power_of_two(values, (-2, -1))
    values = (values / scale).expand(*batch, m, c)
    order = values.mT.argsort(-1, descending=True)  # (…, c, m)
    a = values.mT.gather(-1, order)
    top = (scores + apart).amax(-1, keepdim=True)
    # Keys that are not masked keep some weight, by which they are told from the others.
    high = (scores + apart - top).exp().clamp(min=FLOOR).masked_fill(scores == -torch.inf, 0.0)
    low = (scores - apart - top).exp()
    size = a.abs().amax((-2, -1), keepdim=True)  # (…, 1, 1)
    largest = torch.empty(*batch, n, c, dtype=torch.float64, device=scores.device)
    step = max(1, _BLOCK.get(scores.device.type, 2**23) // max(1, batch.numel() * c * m))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        place = order.unsqueeze(-3).expand(*batch, rows.stop - start, c, m)
        up, down = (w[..., rows, None, :].expand_as(place).gather(-1, place) for w in (high, low))
        ordered = a.unsqueeze(-3)
        total_low, moment_low = down.sum(-1, keepdim=True), (down * ordered).sum(-1, keepdim=True)
        gained = up - down
        weight = total_low + gained.cumsum(-1)
        moment = moment_low + (gained * ordered).cumsum(-1)
        # A cut before the first key is never better than one behind it.
        mean = moment / weight
        if not bool((weight[..., 0] > 1e-250).all()):
            # The box is so wide that all weights of a cut may underflow. The value of the first key that is not masked
            # is above whatever they give.
            mean = torch.where(weight > 1e-250, mean, ordered.masked_fill(up == 0, -torch.inf))
        largest[..., rows, :] = mean.amax(-1)
    # The exponents are rounded, and so are the weights and their sums; a mean of numbers of this size moves by less
    # than that, and never above the largest. What underflowed is below 1e-50 of the rest.
    exponents = (scores.masked_fill(scores == -torch.inf, 0.0).abs() + apart).amax(-1, keepdim=True)
    largest = torch.fmin(largest + size * (16 * (m + 64) * UNIT + 16 * UNIT * exponents), a[..., 0].unsqueeze(-2))
    return (largest + size * m * 1e-49) * scale + FLOOR
