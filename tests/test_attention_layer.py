"""The layer is ordinary attention: it agrees with torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from holdfast import AttentionLayer
from holdfast.testing import Case, changed, make_case

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ARGUMENTS = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "scale", "residual", "mask", "causal")


def torch_attention(layer: AttentionLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and probabilities of the layer, by torch's scaled_dot_product_attention."""
    maps = ((layer.w_q, layer.b_q), (layer.w_k, layer.b_k), (layer.w_v, layer.b_v))
    q, k, v = (torch.einsum("bnd,hdk->bhnk", x, w) + (0 if b is None else b[:, None]) for w, b in maps)
    n = x.shape[-2]
    allowed = torch.ones(n, n, dtype=torch.bool).expand(len(x), 1, n, n)
    if layer.causal:
        allowed = allowed.tril()
    if layer.mask is not None:
        allowed = allowed & (layer.mask if layer.mask.ndim == 2 else layer.mask[:, None])
    options: dict[str, Any] = {"attn_mask": allowed, "scale": layer.scale, "enable_gqa": True}
    identity = torch.eye(n, dtype=x.dtype).expand(len(x), layer.g, n, n)
    heads = F.scaled_dot_product_attention(q, k, v, **options)
    out = torch.einsum("bhnk,hko->bno", heads, layer.w_o) + (0 if layer.b_o is None else layer.b_o)
    if layer.residual:
        out = out + layer.residual * x
    return out, F.scaled_dot_product_attention(q, k, identity, **options)


def assert_same_layer(found: AttentionLayer, expected: AttentionLayer) -> None:
    for name in ARGUMENTS:
        a, b = getattr(found, name), getattr(expected, name)
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b, name
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), name


def everything(dtype: torch.dtype = torch.float64) -> Case:
    case = make_case("everything", h=4, g=2, biases=True, mask="each", causal=True, residual=0.7, scale=0.3)
    return Case(case.name, case.layer.to(dtype), case.x.to(dtype))


# -- the function


def test_equals_torch_attention(combination: Case) -> None:
    output, probabilities = torch_attention(combination.layer, combination.x)
    torch.testing.assert_close(combination.layer(combination.x), output, **CLOSE)
    torch.testing.assert_close(combination.layer.attention(combination.x), probabilities, **CLOSE)


def test_default_scale_is_that_of_torch() -> None:
    case = make_case("default", k=3)
    assert case.layer.scale == pytest.approx(3**-0.5, rel=1e-15)
    assert changed(case.layer, scale=0.25).scale == 0.25


def test_leading_dimensions_may_be_missing_or_several() -> None:
    case = everything()
    out, p = case.layer(case.x), case.layer.attention(case.x)
    one = case.member(1)
    torch.testing.assert_close(one.layer(one.x), out[1], **CLOSE)
    torch.testing.assert_close(one.layer.attention(one.x), p[1], **CLOSE)
    several = torch.stack([case.x, 2 * case.x, 3 * case.x])  # the mask is for the last batch dimension
    torch.testing.assert_close(case.layer(several)[0], out, **CLOSE)
    assert case.layer(several).shape == (3, *out.shape)
    assert case.layer.attention(several).shape == (3, *p.shape)


def test_masked_pairs_have_no_probability() -> None:
    case = everything()
    allowed = case.layer.allowed(4)
    assert allowed is not None
    p = case.layer.attention(case.x).movedim(1, -1)
    assert bool((p[~allowed] == 0).all())
    assert bool((p[allowed] > 0).all())
    torch.testing.assert_close(p.sum(-2), torch.ones_like(p[..., 0, :]), **CLOSE)


def test_causal_output_ignores_later_tokens() -> None:
    case = make_case("causal", causal=True)
    later = case.x.clone()
    later[:, 2:] += 1
    assert torch.equal(case.layer(later)[:, :2], case.layer(case.x)[:, :2])
    assert not torch.equal(case.layer(later)[:, 2:], case.layer(case.x)[:, 2:])


def test_grouped_heads_share_keys_and_values() -> None:
    case = make_case("grouped", h=4, g=2, biases=True)
    layer = case.layer
    repeated = {name: getattr(layer, name).repeat_interleave(2, 0) for name in ("w_k", "w_v", "b_k", "b_v")}
    torch.testing.assert_close(changed(layer, **repeated)(case.x), layer(case.x), **CLOSE)


# -- torch's modules


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", [None, "shared", "each", "causal"])
def test_equals_multihead_attention(bias: bool, batch_first: bool, mask: str | None) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first, dtype=torch.float64).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)  # its own biases start at zero
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed = {"shared": causal.mT, "each": torch.stack([causal, causal.mT]), "causal": causal}.get(mask or "")
    forbidden = None if allowed is None else ~(allowed if allowed.ndim == 2 else allowed.repeat_interleave(3, 0))
    tokens = x if batch_first else x.transpose(0, 1)
    output, weights = module(tokens, tokens, tokens, attn_mask=forbidden, average_attn_weights=False)
    given = {"causal": True} if mask == "causal" else {"mask": allowed}
    for residual in (0.0, 1.0):
        layer = AttentionLayer.from_module(module, residual=residual, **given)  # type: ignore[arg-type]
        expected = (output if batch_first else output.transpose(0, 1)) + residual * x
        torch.testing.assert_close(layer(x), expected, **CLOSE)
        torch.testing.assert_close(layer.attention(x), weights, **CLOSE)
    assert (layer.b_q is not None) is bias


def test_equals_the_self_attention_of_an_encoder_layer() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, norm_first=True, dtype=torch.float64).eval()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    layer = AttentionLayer.from_module(module, residual=1.0)
    attended = x + module.self_attn(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(layer(x), attended, **CLOSE)
    # The whole block, with our attention in the place of its own.
    normed = module.norm1(x)
    inner = x + AttentionLayer.from_module(module)(normed)
    torch.testing.assert_close(inner + module._ff_block(module.norm2(inner)), module(x), **CLOSE)


def test_module_weights_are_shared_and_need_no_gradient() -> None:
    module = nn.MultiheadAttention(6, 2)
    layer = AttentionLayer.from_module(module)
    assert layer.dtype == torch.float32
    assert not layer.w_q.requires_grad
    with torch.no_grad():
        module.out_proj.weight.zero_()
    assert bool((layer.w_o == 0).all())


# -- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load(dtype: torch.dtype, tmp_path: Path) -> None:
    for case in (everything(dtype), make_case("plain")):
        path = tmp_path / "layer.safetensors"
        case.layer.save(path)
        loaded = AttentionLayer.load(path)
        assert_same_layer(loaded, case.layer)
        assert torch.equal(loaded(case.x), case.layer(case.x))
    assert [file.name for file in path.parent.iterdir()] == ["layer.safetensors"]


def test_file_has_the_names_of_the_arguments(tmp_path: Path) -> None:
    everything().layer.save(tmp_path / "layer.safetensors")
    assert set(load_file(tmp_path / "layer.safetensors")) == set(ARGUMENTS)


def test_four_weights_are_enough_to_load(tmp_path: Path) -> None:
    layer = make_case("plain").layer
    save_file({name: getattr(layer, name) for name in ARGUMENTS[:4]}, tmp_path / "layer.safetensors")
    assert_same_layer(AttentionLayer.load(tmp_path / "layer.safetensors"), layer)


def test_layer_from_a_module_can_be_saved(tmp_path: Path) -> None:
    layer = AttentionLayer.from_module(nn.MultiheadAttention(6, 2))  # its tensors share one storage
    layer.save(tmp_path / "layer.safetensors")
    assert_same_layer(AttentionLayer.load(tmp_path / "layer.safetensors"), layer)


# -- other forms


def test_to_changes_the_dtype_alone() -> None:
    case = everything()
    single = case.layer.to(torch.float32)
    assert single.dtype == torch.float32
    assert (single.scale, single.residual, single.causal) == (0.3, 0.7, True)
    assert torch.equal(single.mask, case.layer.mask)  # type: ignore[arg-type]
    torch.testing.assert_close(single(case.x.float()).double(), case.layer(case.x), rtol=1e-4, atol=1e-4)
    assert_same_layer(single.double().to(torch.float32), single)
    assert case.layer.double() is case.layer


def test_part_is_the_layer_for_some_members() -> None:
    case = everything()
    out = case.layer(case.x)
    part = case.layer.part(case.x.shape[:-2], 1, 2)
    torch.testing.assert_close(part(case.x[1:2]), out[1:2], **CLOSE)
    several = torch.stack([case.x, case.x + 1]).flatten(0, 1)  # members 0 to 3 of a (2, 2) batch
    part = case.layer.part(torch.Size((2, 2)), 1, 4)
    torch.testing.assert_close(part(several[1:4])[0], out[1], **CLOSE)
    assert part(several[1:4]).shape == (3, *out.shape[1:])
    shared = make_case("shared", mask="shared").layer
    assert shared.part(torch.Size((2,)), 0, 1) is shared


def test_with_mask_replaces_the_mask_alone() -> None:
    case = everything()
    bare = case.layer.with_mask(None)
    assert bare.mask is None
    assert_same_layer(bare.with_mask(case.layer.mask), case.layer)


def test_sizes_and_repr() -> None:
    case = everything()
    layer = case.layer
    assert (layer.h, layer.g, layer.d, layer.k, layer.d_out) == (4, 2, 4, 2, 4)
    assert layer.device == torch.device("cpu")
    assert repr(layer) == (
        "AttentionLayer(h=4, g=2, d=4, k=2, d_out=4, torch.float64, residual=0.7, mask=(2, 4, 4), causal=True)"
    )
    assert repr(make_case("plain").layer) == "AttentionLayer(h=2, g=2, d=4, k=2, d_out=4, torch.float64)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu() -> None:
    case = everything()
    layer, x = case.layer.to(device="cuda"), case.x.cuda()
    assert layer.device.type == "cuda"
    torch.testing.assert_close(layer(x).cpu(), case.layer(case.x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(layer.attention(x).cpu(), case.layer.attention(case.x), rtol=1e-11, atol=1e-11)
