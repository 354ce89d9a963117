"""The standard vision transformer: read by the graph reader, and clear about wrong sizes."""

import pytest
import torch

from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.models.vit import Pool, VisionTransformer


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_graph_reader_reads_it(pool: Pool) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(side=8, channels=3, patch=4, depth=2, width=12, heads=3, pool=pool)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model = model.eval().requires_grad_(False).double()
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    converted = to_network(model, images)
    torch.testing.assert_close(converted.network(converted.encode(images)), model(images))


def test_a_patch_sees_its_own_pixels_alone() -> None:
    model = VisionTransformer(side=8, channels=1, patch=4, depth=0, width=4, heads=1, pool="mean")
    images = torch.zeros(1, 1, 8, 8)
    moved = images.clone()
    moved[..., 4:, :4] += torch.rand(4, 4)
    changed = (model._embed(moved) - model._embed(images)).abs().amax(-1) > 0
    assert changed.tolist() == [[False, False, True, False]]


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="patch=3 must divide side=8"):
        VisionTransformer(side=8, channels=3, patch=3, depth=1, width=8, heads=2)
    with pytest.raises(InputError, match="pool is 'max'; expected"):
        VisionTransformer(side=8, channels=3, patch=4, depth=1, width=8, heads=2, pool="max")  # type: ignore[arg-type]
    model = VisionTransformer(side=8, channels=3, patch=4, depth=1, width=8, heads=2)
    with pytest.raises(InputError, match=r"shape \(1, 1, 8, 8\); expected \(b, 3, 8, 8\)"):
        model(torch.rand(1, 1, 8, 8))
