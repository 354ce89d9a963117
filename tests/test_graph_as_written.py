"""Models as people write them: read as what they are, or refused in one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast
from graph_cases import check
from holdfast.errors import HoldfastError
from holdfast.graph.entrywise import X, function, rising
from holdfast.layers.norm.piece import LayerNorm, RMSNorm


class Written(nn.Module):
    """Three classes from a formula that uses the maps a and h of four numbers."""

    def __init__(self, formula: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.w = nn.Linear(4, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(4) + 0.5)
        self._formula = formula
        self.eval()

    def forward(self, z: Tensor) -> Tensor:
        return self._formula(self, z)


def certified(model: nn.Module, x: Tensor, **options: Any) -> Any:
    (record,) = holdfast.certify(model, [(x, 0)], radii=[0.1], progress=False, **options).records
    return record


def refused(model: nn.Module, x: Tensor, line: str, **options: Any) -> None:
    with pytest.raises(HoldfastError, match=line) as error:
        certified(model, x, **options)
    assert "\n" not in str(error.value)


def test_an_answer_that_ignores_every_token_that_moves() -> None:
    model = Written(lambda self, z: self.h(torch.cat([self.w.expand(len(z), 1, -1), z], 1)[:, 0]))
    refused(model, torch.randn(2, 4), "the logits of Written do not depend on what moves")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_read_in_float64(dtype: torch.dtype) -> None:
    model, x = Written(lambda self, z: self.h(torch.relu(self.a(z)))).to(dtype), torch.randn(4).to(dtype)
    radius = certified(model, x).radius
    assert radius == certified(model.double(), x.double()).radius > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda u: u + functional.gelu(u),
        lambda u: functional.gelu(u) - 0.5 * u,  # 0.5 u erf(u/√2)
        lambda u: 0.1 * u + functional.gelu(u, approximate="tanh"),
        lambda u: u + functional.silu(u),
        lambda u: 1 - 2 * u + torch.tanh(3 * u),
        lambda u: u + 3 * torch.sigmoid(u),
        lambda u: u + functional.relu(2 * u),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_an_activation_is_of_may_be_added_to_it(function: Callable[[Tensor], Tensor], tokens: int) -> None:
    check(Written(lambda self, z: self.h(function(self.a(z))).mean(1)), torch.randn(2, tokens, 4))


def test_a_sum_that_falls_somewhere_does_not_change_places_with_a_maximum() -> None:
    kinked = function("relu", X.scaled(2.0))
    assert rising(kinked)
    assert rising(kinked + X.scaled(0.7))
    assert not rising(kinked + X.scaled(-0.7))


def test_a_branch_on_values_gets_one_line_and_no_page_from_torch(capfd: pytest.CaptureFixture[str]) -> None:
    model = Written(lambda self, z: self.h(z) if z.sum() > 0 else -self.h(z))
    refused(model, torch.randn(4), "branches on the values of tensors")
    assert capfd.readouterr().err == ""


def inverse_root(z: Tensor) -> Tensor:
    return torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize(
    "norm",
    [
        lambda w, z: w * z * inverse_root(z),
        lambda w, z: z * w / torch.sqrt(z.square().mean(-1, keepdim=True) + 1e-5),
        lambda w, z: w * (z * inverse_root(z)),
        lambda w, z: w * (z - z.mean(-1, keepdim=True)) * torch.rsqrt(z.var(-1, correction=0, keepdim=True) + 1e-5),
    ],
)
def test_the_weights_of_a_norm_may_come_before_it(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    converted = check(Written(lambda self, z: self.h(norm(self.w, self.a(z))).mean(1)), torch.randn(2, 3, 4))
    (weighed,) = [piece for piece in converted.network.stages if isinstance(piece, LayerNorm | RMSNorm)]
    torch.testing.assert_close(weighed.gamma, Written(norm).w.double())


def test_the_weights_of_a_norm_may_come_before_it_where_the_first_word_is_padding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.h, self.w = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Parameter(torch.rand(4) + 0.5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            z = self.words(input_ids)
            return self.h((self.w * z * inverse_root(z))[:, -1])

    check(Words().eval(), {"input_ids": torch.tensor([[0, 3, 5]]), "attention_mask": torch.tensor([[0, 1, 1]])})


def test_a_norm_of_something_else_is_refused() -> None:
    w = torch.rand(3, 4) + 0.5  # other numbers for every token
    for other in (lambda self, z: self.w + z, lambda self, z: w * z, lambda self, z: self.h.weight[0, 0] * self.a(z)):
        model = Written(lambda self, z, of=other: self.h(of(self, z) * inverse_root(z)).mean(1))
        refused(model, torch.randn(3, 4), "something other than what it divides")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("back", [lambda u, to: u.double().to(to), lambda u, to: u.to(to)])
def test_a_cast_to_float32_inside_is_rounding(dtype: torch.dtype, back: Callable[..., Tensor]) -> None:
    """The network is that of the model without the cast, and so are its radii."""
    model = Written(lambda self, z: self.h(back(functional.gelu(self.a(z).float()), z.dtype)))
    plain = Written(lambda self, z: self.h(functional.gelu(self.a(z))))
    for x in torch.randn(2, 4):
        radius = certified(model.to(dtype), x.to(dtype), method="gains").radius
        assert radius == certified(plain.to(dtype), x.to(dtype), method="gains").radius > 0


def test_a_cast_inside_excuses_no_more_than_its_rounding() -> None:
    """With gradients these models return something else: by more than 1e-4 with a cast, by less without."""
    for change, inner in ((2e-3, torch.float32), (1e-6, torch.float64)):
        model = Written(
            lambda self, z, c=change, to=inner: (
                self.h(functional.gelu(self.a(z).to(to)).to(z.dtype)) * (1 + c * torch.is_grad_enabled())
            )
        )
        refused(model.double(), torch.randn(4).double(), "not the model in torch.float64 with gradients")


LINEAR, TOKENS = Written(lambda self, z: self.h(z)), Written(lambda self, z: self.h(z).mean(1))
IMAGE = Written(lambda self, z: self.h(z.flatten(1)))


@pytest.mark.parametrize(
    ("model", "x", "options", "line"),
    [
        (TOKENS, torch.randn(2, 4), {"perturb": ("layer", 0)}, "Written has no attention, and so no layers"),
        (IMAGE, torch.full((1, 2, 2), 0.3), {"perturb": "contrast"}, "'contrast', and the numbers of the image are"),
        (LINEAR, torch.ones(4), {"norm": "linf", "clip": (1, 1)}, r"clip is \(1.0, 1.0\); .* then a larger one"),
        (LINEAR, torch.ones(4).double() * 1e200, {}, "logits .* are not finite, .* do not overflow"),
    ],
)
def test_what_cannot_move_gets_one_line(model: nn.Module, x: Tensor, options: dict[str, Any], line: str) -> None:
    refused(model, x, line, **options)


def test_weights_that_are_not_finite() -> None:
    model = Written(lambda self, z: self.h(z))
    with torch.no_grad():
        model.h.weight[0, 0] = torch.inf
    refused(model, torch.randn(4), "logits .* are not finite, .*; expected finite weights")


@pytest.mark.parametrize("label", [0.5, torch.tensor(0.5), float("inf"), float("nan")])
def test_a_label_is_a_whole_number(label: Any) -> None:
    with pytest.raises(HoldfastError, match=r"a label is .*; expected whole numbers"):
        holdfast.certify(LINEAR, [(torch.randn(4), label)], radii=[0.1], progress=False)


@pytest.mark.parametrize(
    ("part", "line"),
    [(0, "has queries that do not move beside others"), (1, "has keys that do not"), (2, "has values that do not")],
)
def test_attention_of_which_one_part_is_fixed(part: int, line: str) -> None:
    def formula(self: Written, z: Tensor) -> Tensor:
        given = [self.a.weight[:3].expand(len(z), -1, -1) if i == part else self.a(z) for i in range(3)]
        return self.h(functional.scaled_dot_product_attention(*given)[:, 0])

    refused(Written(formula), torch.randn(3, 4), line)
