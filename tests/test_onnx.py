"""ONNX files: executed in torch as others execute them, read like any model, refused with the node's name."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import InputError
from holdfast.errors import ConversionError
from holdfast.graph import onnx as front
from holdfast.graph import onnx_operators, to_network
from holdfast.graph.onnx import OnnxModel
from onnx_cases import CASES, MASKS, SmallViT, exported, helper, ints, node, normal, onnx, write


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_every_operator_has_a_case() -> None:
    assert onnx_operators.OPERATORS.keys() == CASES.keys() | MASKS


@pytest.mark.parametrize("operator", CASES)
def test_operators_compute_what_the_file_says(operator: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for nodes, shape, constants, opset in CASES[operator]:
        model = OnnxModel(write(tmp_path / "one.onnx", nodes, shape, constants, opset=opset))
        x = random(shape)
        found, expected = model(x), model.executed(x)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_masks_of_words_are_made_in_the_file(tmp_path: Path) -> None:
    """Padding where the id is 0, as an additive mask of an embedding's rows."""
    nodes = [
        node("Gather", "table", "x", out="rows"),
        node("Equal", "x", "zero", out="pad"),
        node("Not", "pad", out="kept"),
        node("GreaterOrEqual", "x", "zero", out="valid"),
        node("And", "kept", "valid", out="both"),
        node("Cast", "both", to=1, out="mask"),
        node("Unsqueeze", "mask", "last", out="column"),
        node("Mul", "rows", "column", out="masked"),
        node("ReduceSum", "masked", "one", out="y", keepdims=0),
    ]
    table = {"table": normal(7, 3), "zero": np.int64(0), "last": ints(-1), "one": ints(1)}
    model = OnnxModel(write(tmp_path / "words.onnx", nodes, ("b", 4), table, kind=7))
    ids = torch.tensor([[3, 5, 0, 0], [1, 2, 6, 0]])
    torch.testing.assert_close(model(ids), model.executed(ids))


@pytest.mark.parametrize("opset", [14, 20])
def test_an_exported_vit_is_read_like_any_model(opset: int, tmp_path: Path) -> None:
    vit, x = SmallViT(), random((2, 1, 8, 8))
    model = OnnxModel(exported(vit, x[:1], tmp_path / "vit.onnx", opset))
    torch.testing.assert_close(model(x), vit(x), rtol=1e-5, atol=1e-6)
    converted = to_network(model, x)
    assert converted.equality is not None
    assert converted.equality.difference < 1e-12
    blocks = [type(piece).__name__ for piece in converted.network.pieces()]
    assert blocks.count("Attention") == 1
    assert blocks.count("Mlp") == 1


def test_normalisation_by_statistics_stays_inside_a_residual_branch(tmp_path: Path) -> None:
    """The sum x + f(BatchNorm(x)) with the channels moved to and fro is one residual stage, behind positions too."""
    nodes = [
        node("Add", "x", "positions", out="p"),
        node("Transpose", "p", perm=[0, 2, 1], out="t"),
        node("BatchNormalization", "t", "a", "b", "m", "v", out="n"),
        node("Transpose", "n", perm=[0, 2, 1], out="u"),
        node("MatMul", "u", "w", out="h"),
        node("Relu", "h", out="r"),
        node("MatMul", "r", "w", out="o"),
        node("Add", "p", "o", out="s"),
        node("ReduceMean", "s", axes=[1], keepdims=0),
    ]
    given = {name: normal(3) for name in "abm"} | {"v": np.abs(normal(3)), "w": normal(3, 3), "positions": normal(4, 3)}
    network = to_network(OnnxModel(write(tmp_path / "b.onnx", nodes, (1, 4, 3), given)), random((2, 4, 3))).network
    assert [type(stage).__name__ for stage in network.stages] == ["AddPositions", "Residual", "TokenMean"]


def test_a_network_that_is_not_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relu that does nothing: the same at points with positive entries, and caught around them."""
    path = write(
        tmp_path / "m.onnx", [node("Relu", "x", out="r"), node("MatMul", "r", "w")], ("b", 4), {"w": normal(4, 3)}
    )
    monkeypatch.setitem(onnx_operators.OPERATORS, "Relu", lambda call: call.tensor(0))
    with pytest.raises(ConversionError, match=r"m\.onnx: logits differ from those of the file, executed by"):
        to_network(OnnxModel(path), torch.ones(1, 4))


def test_batches_are_executed_one_by_one(tmp_path: Path) -> None:
    nodes = [node("Reshape", "x", "c", out="f"), node("MatMul", "f", "w")]  # written for one input
    model = OnnxModel(write(tmp_path / "m.onnx", nodes, (1, 2, 3), {"c": ints(1, 6), "w": normal(6, 2)}))
    x = random((3, 2, 3))
    torch.testing.assert_close(model(x), torch.cat([model(row) for row in x.split(1)]))


def test_unknown_operators_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Elu", "x", out="e"), node("Relu", "e")], (1, 4))
    with pytest.raises(ConversionError, match="node 'Elu to e': operator 'Elu' is not known; expected one of Abs"):
        OnnxModel(path)


def test_random_nodes_and_graphs_inside_nodes_are_refused(tmp_path: Path) -> None:
    noise = [node("RandomNormal", shape=[1, 4], scale=1e-6, out="e"), node("Add", "x", "e")]
    with pytest.raises(ConversionError, match="node 'RandomNormal to e': operator 'RandomNormal' draws at random"):
        OnnxModel(write(tmp_path / "m.onnx", noise, (1, 4)))
    inner = helper.make_graph([node("Relu", "x", out="r")], "inner", [], [helper.make_tensor_value_info("r", 1, None)])
    chosen = [node("If", "c", then_branch=inner, else_branch=inner)]
    with pytest.raises(ConversionError, match="node 'If to y': operator 'If' chooses or repeats a graph of its own"):
        OnnxModel(write(tmp_path / "m.onnx", chosen, (1, 4), {"c": np.array(True)}))


def test_operators_without_a_piece_are_refused_by_their_node(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.onnx", [node("MatMul", "x", "w", out="h"), node("Softmax", "h")], (1, 4), {"w": normal(4, 3)}
    )
    with pytest.raises(
        ConversionError, match=r"'node\.Softmax to y': operator 'softmax' takes softmax of something other"
    ):
        to_network(OnnxModel(path), torch.ones(1, 4))


def test_other_domains_and_old_operator_sets_are_refused(tmp_path: Path) -> None:
    other = helper.make_node("FusedGelu", ["x"], ["y"], name="fast", domain="com.vendor")
    with pytest.raises(ConversionError, match=r"node 'fast': operator 'FusedGelu' is of the domain 'com\.vendor'"):
        OnnxModel(write(tmp_path / "m.onnx", [other], (1, 4)))
    with pytest.raises(ConversionError, match=r"m\.onnx has operator set 6; expected 7 or newer"):
        OnnxModel(write(tmp_path / "m.onnx", [node("Relu", "x")], (1, 4), opset=6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training_mode": 1}, "normalises by the batch; export the model for inference"),
        ({}, "has an input 1 that depends on the model's input; expected a constant"),
    ],
)
def test_what_depends_on_the_batch_or_on_values_is_refused(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    if change:
        nodes = [helper.make_node("BatchNormalization", ["x", *"abcd"], ["y", "m", "v"], name="n", **change)]
        path = write(tmp_path / "m.onnx", nodes, (1, 3), {name: np.abs(normal(3)) for name in "abcd"})
    else:
        path = write(tmp_path / "m.onnx", [node("Pow", "x", "x")], (1, 3))
    with pytest.raises(ConversionError, match=message):
        OnnxModel(path)(torch.ones(1, 3))


def test_bad_files_and_inputs_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file '.*none\.onnx'; expected an ONNX file"):
        OnnxModel(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_text("no model")
    with pytest.raises(InputError, match=r"bad\.onnx' cannot be read as ONNX: "):
        OnnxModel(tmp_path / "bad.onnx")
    model = OnnxModel(write(tmp_path / "m.onnx", [node("Relu", "x")], ("b", 4)))
    with pytest.raises(InputError, match=r"m\.onnx takes x of shape \(any, 4\); got \(2, 5\)"):
        model(torch.ones(2, 5))
    with pytest.raises(InputError, match=r"m\.onnx takes x; got 2 tensors"):
        model(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(InputError, match="expected a file for one input at a time"):
        OnnxModel(write(tmp_path / "m.onnx", [node("Relu", "x")], (8, 4)))(torch.ones(8, 4))


def test_several_outputs_need_one_called_logits(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Relu", "x")], (1, 4))
    proto = onnx.load(str(path))
    proto.graph.output.append(helper.make_tensor_value_info("z", 1, None))
    proto.graph.node.append(node("Abs", "x", out="z"))
    onnx.save(proto, str(path))
    with pytest.raises(ConversionError, match="has outputs y, z; expected one, or one called logits"):
        OnnxModel(path)


def test_files_are_compared_without_onnxruntime_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "available", lambda package: False)
    model = OnnxModel(write(tmp_path / "m.onnx", [node("MatMul", "x", "w")], (1, 4), {"w": normal(4, 3)}))
    x = random((2, 4))
    torch.testing.assert_close(model.executed(x), model(x))
    with pytest.raises(ConversionError, match=r"executed by onnx\.reference, by 1; the largest is"):
        model.check(x, model(x) + 1)


def test_models_keep_their_file_when_copied(tmp_path: Path) -> None:
    model = OnnxModel(write(tmp_path / "m.onnx", [node("MatMul", "x", "w")], (1, 4), {"w": normal(4, 3)}))
    assert isinstance(model, nn.Module)
    twin = copy.deepcopy(model).double()
    x = random((2, 4))
    assert twin(x.double()).dtype == torch.float64
    torch.testing.assert_close(twin(x.double()).float(), model.executed(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of torch's tracer
def test_a_trace_of_a_model_shows_a_network_as_torch_has_it(tmp_path: Path) -> None:
    nodes = [node("BatchNormalization", "x", *"abmv", out="h"), node("Gemm", "h", "w", transB=1)]
    weights = {name: np.abs(normal(4)) for name in "abmv"} | {"w": normal(3, 4)}
    model = OnnxModel(write(tmp_path / "m.onnx", nodes, (1, 4), weights))
    named = {name.split()[-1] for name, _ in model.named_parameters()}
    assert named == {"a", "b", "w"}
    assert not any(weight.requires_grad for weight in model.parameters())
    assert {name.split()[-1] for name, _ in model.named_buffers()} == {"m", "v"}
    traced = torch.jit.trace(model, (torch.ones(1, 4),)).inlined_graph
    kinds = {one.kind() for one in traced.nodes() if one.kind().startswith("aten::")}
    assert kinds == {"aten::batch_norm", "aten::transpose", "aten::matmul"}
