"""Small ONNX files, one for each operator, and a ViT."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

onnx = pytest.importorskip("onnx")
helper = onnx.helper

_RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return _RANDOM.standard_normal(shape).astype(np.float32)


def write(
    path: Path, nodes: Sequence[Any], shape: Sequence[int | str], constants: Mapping[str, Any] | None = None, *,
    opset: int = 17, kind: int = 1, output_kind: int = 1
) -> Path:  # fmt: skip
    """A file whose input is x and whose output is y."""
    x = helper.make_tensor_value_info("x", kind, shape)
    y = helper.make_tensor_value_info("y", output_kind, None)
    given = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(nodes, "graph", [x], [y], given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.save(model, str(path))
    return path


def node(operator: str, *names: str, out: str = "y", **attributes: Any) -> Any:
    return helper.make_node(operator, list(names), [out], name=f"{operator} to {out}", **attributes)


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


#: For each operator one or more of (nodes, shape of x, constants, operator set).
CASES: dict[str, list[tuple[list[Any], tuple[int, ...], dict[str, Any], int]]] = {
    **{name: [([node(name, "x")], (1, 6), {}, 17)] for name in ("Relu", "Tanh", "Sigmoid", "Erf", "Abs", "Neg")},
    **{name: [([node(name, "x")], (1, 6), {}, 17)] for name in ("Identity", "Flatten", "Transpose", "LeakyRelu")},
    **{name: [([node("Abs", "x", out="a"), node(name, "a")], (1, 6), {}, 17)] for name in ("Sqrt", "Reciprocal")},
    **{name: [([node(name, "x", "c")], (1, 6), {"c": normal(6)}, 17)] for name in ("Add", "Sub", "Mul", "Div")},
    "Sum": [([node("Sum", "x", "c", "x")], (1, 6), {"c": normal(6)}, 17)],
    "Pow": [([node("Pow", "x", "c")], (1, 6), {"c": np.float32(3)}, 17)],
    "Gelu": [([node("Gelu", "x", approximate=a)], (1, 6), {}, 20) for a in ("none", "tanh")],
    "Clip": [
        ([node("Clip", "x", "c")], (1, 6), {"c": np.float32(0)}, 17),
        ([node("Clip", "x", min=-0.5, max=0.5)], (1, 6), {}, 10),
    ],
    "Cast": [([node("Cast", "x", to=1)], (1, 6), {}, 17)],
    "Dropout": [([node("Dropout", "x")], (1, 6), {}, 17)],
    "Reshape": [([node("Reshape", "x", "c")], (1, 6, 2), {"c": ints(0, 3, -1)}, 17)],
    "Squeeze": [
        ([node("Squeeze", "x", "c")], (1, 6, 1), {"c": ints(-1)}, 17),
        ([node("Squeeze", "x", axes=[2])], (1, 6, 1), {}, 11),
    ],
    "Unsqueeze": [
        ([node("Unsqueeze", "x", "c")], (1, 6), {"c": ints(0, -1)}, 17),
        ([node("Unsqueeze", "x", axes=[1])], (1, 6), {}, 11),
    ],
    "Concat": [([node("Concat", "c", "x", axis=1)], (1, 6), {"c": normal(1, 2)}, 17)],
    "Slice": [
        ([node("Slice", "x", "a", "b", "c", "d")], (1, 6),
         {"a": ints(-1), "b": ints(-(2**62)), "c": ints(1), "d": ints(-2)}, 17),
        ([node("Slice", "x", starts=[1], ends=[2**31], axes=[1])], (1, 6), {}, 9),
    ],
    "Split": [
        ([helper.make_node("Split", ["x", "c"], ["a", "y"], axis=1)], (1, 6), {"c": ints(2, 4)}, 17),
        ([helper.make_node("Split", ["x"], ["a", "y"], axis=1)], (1, 6), {}, 11),
    ],
    "Gather": [
        ([node("Gather", "x", "c", axis=1)], (1, 6, 2), {"c": np.int64(-1)}, 17),
        ([node("Gather", "x", "c", axis=1)], (1, 6, 2), {"c": ints(3, 0, -1)}, 17),
    ],
    "Expand": [([node("Expand", "x", "c")], (1, 1, 6), {"c": ints(1, 3, 1)}, 17)],
    "Tile": [([node("Tile", "x", "c")], (1, 6), {"c": ints(1, 2)}, 17)],
    "Pad": [
        ([node("Pad", "x", "a", "b")], (1, 2, 3), {"a": ints(0, 1, 2, 0, 0, 1), "b": np.float32(0.5)}, 17),
        ([node("Pad", "x", pads=[0, 1, 0, 2])], (1, 6), {}, 10),
    ],
    "Where": [([node("Where", "c", "x", "a")], (1, 4), {"c": np.array([True, False] * 2), "a": normal(4)}, 17)],
    "ReduceMean": [
        ([node("ReduceMean", "x", axes=[-1], keepdims=0)], (1, 2, 3), {}, 17),
        ([node("ReduceMean", "x", "c")], (1, 2, 3), {"c": ints(1)}, 18),
    ],
    "ReduceSum": [([node("ReduceSum", "x", "c")], (1, 2, 3), {"c": ints(1, 2)}, 17)],
    "GlobalAveragePool": [([node("GlobalAveragePool", "x")], (1, 2, 4, 4), {}, 17)],
    "AveragePool": [
        ([node("AveragePool", "x", kernel_shape=[2, 2], strides=[2, 1], pads=[1, 0, 1, 0], count_include_pad=1)],
         (1, 2, 4, 4), {}, 17),
    ],
    "GlobalMaxPool": [([node("GlobalMaxPool", "x")], (1, 2, 4, 4), {}, 17)],
    "MaxPool": [
        ([node("MaxPool", "x", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], ceil_mode=1)], (1, 2, 4, 4),
         {}, 17),
        ([node("MaxPool", "x", kernel_shape=[2], auto_pad="SAME_LOWER")], (1, 2, 7), {}, 17),
        ([node("MaxPool", "x", kernel_shape=[2], pads=[1, 1], dilations=[3])], (1, 2, 7), {}, 17),
    ],
    "ReduceMax": [([node("ReduceMax", "x", axes=[1, 3], keepdims=0)], (1, 2, 3, 4), {}, 17)],
    "MatMul": [([node("MatMul", "x", "c")], (1, 3, 4), {"c": normal(4, 2)}, 17)],
    "Gemm": [
        ([node("Gemm", "x", "a", "b", transB=1, alpha=0.5, beta=2.0)], (1, 4),
         {"a": normal(3, 4), "b": normal(3)}, 17),
    ],
    "Einsum": [([node("Einsum", "x", "c", equation="b n d, d e -> b e n")], (1, 3, 4), {"c": normal(4, 2)}, 17)],
    "Conv": [
        ([node("Conv", "x", "a", "b", group=2, strides=[2, 1], pads=[1, 0, 0, 1])], (1, 4, 5, 5),
         {"a": normal(2, 2, 3, 3), "b": normal(2)}, 17),
        ([node("Conv", "x", "a", auto_pad="SAME_UPPER", strides=[2])], (1, 2, 7), {"a": normal(3, 2, 2)}, 17),
    ],
    "BatchNormalization": [
        ([node("BatchNormalization", "x", *"abcd", epsilon=1e-3)], (1, 3, 4),
         {"a": normal(3), "b": normal(3), "c": normal(3), "d": np.abs(normal(3))}, 17),
    ],
    "LayerNormalization": [
        ([node("LayerNormalization", "x", "a", "b", axis=-1)], (1, 3, 4), {"a": normal(4), "b": normal(4)}, 17),
    ],
    "RMSNormalization": [([node("RMSNormalization", "x", "a")], (1, 3, 4), {"a": normal(4)}, 23)],
    "Softmax": [
        ([node("Softmax", "x", axis=1)], (1, 3, 4), {}, 17),
        ([node("Softmax", "x", axis=1)], (1, 3, 4), {}, 11),
    ],
}  # fmt: skip

#: Operators on truth values and whole numbers, which a mask is made of.
MASKS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Not"}


class SmallViT(nn.Module):
    """A convolution, a class token, positions, fused queries, keys and values, GELU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(1, 12, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.positions = nn.Parameter(torch.randn(1, 5, 12))
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        b = len(images)
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(b, -1, -1), x], 1) + self.positions
        q, k, v = self.qkv(self.first(x)).reshape(b, 5, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        heads = (q @ k.transpose(-1, -2) / math.sqrt(4)).softmax(-1) @ v
        x = x + self.out(heads.transpose(1, 2).reshape(b, 5, 12))
        x = x + self.mlp(self.second(x))
        logits: Tensor = self.head(x[:, 0])
        return logits


def exported(model: nn.Module, example: Tensor, path: Path, opset: int = 17) -> Path:
    """What torch writes, for batches of any size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (example,), str(path), dynamo=False, input_names=["x"], output_names=["y"],
            opset_version=opset, dynamic_axes={"x": {0: "b"}},
        )  # fmt: skip
    return path
