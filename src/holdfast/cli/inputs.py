"""What the commands read: a saved layer with its input, or the bundled demo; and radii."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.data.digits import demo_digits
from holdfast.errors import InputError
from holdfast.models import load_digits_vit
from holdfast.storage import check_output, parse_size, read_tensors

LayerFile = Annotated[Path | None, typer.Argument(help="A layer in safetensors: w_q, w_k, w_v, w_o, …")]
InputFile = Annotated[Path | None, typer.Argument(help="Its input in safetensors: a tensor x (…, n, d).")]
Demo = Annotated[bool, typer.Option("--demo", help="Take a layer of the bundled digits model, at test digits.")]
DemoLayer = Annotated[int, typer.Option(help="Which attention layer of the demo model.")]
Inputs = Annotated[int, typer.Option(min=1, help="The most inputs of the batch to take.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed for everything random.")]
Eps = Annotated[str, typer.Option(help="Radii, separated by commas.")]


def writable(path: Path | None) -> Path | None:
    """An option's file, refused before the work begins if it could not be written."""
    if path is not None:
        check_output(path)
    return path


def _bytes(size: str | None) -> str | None:
    """An option's size, refused before the work begins if it is not one."""
    if size is not None:
        parse_size(size)
    return size


def refuse_same(*outputs: Path | None, keep: Sequence[Path] = ()) -> None:
    """Refuses one name for two outputs, and an output that would overwrite an input file."""
    taken = {path.resolve() for path in keep}
    for path in outputs:
        if path is None:
            continue
        if path.resolve() in taken:
            raise InputError(f"{str(path)!r} names two files of this command; give each its own name")
        taken.add(path.resolve())


Html = Annotated[Path | None, typer.Option(help="Write the page to this file.", callback=writable)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
ShardSize = Annotated[
    str | None, typer.Option(help="Largest file size, such as 15MB; larger files are split.", callback=_bytes)
]
Out = Annotated[Path | None, typer.Option(help="Also write the JSON to this file.", callback=writable)]


@dataclass(frozen=True)
class ChosenLayer:
    """A layer, the inputs (b, n, d) at which it is analyzed, and what to call it."""

    name: str
    layer: AttentionLayer
    x: Tensor

    def part(self, start: int, stop: int) -> ChosenLayer:
        """The same layer at some of the inputs."""
        layer = self.layer.part(self.x.shape[:1], start, stop)
        return ChosenLayer(self.name, layer, self.x[start:stop])


def read_subject(layer: Path | None, x: Path | None, demo: bool, demo_layer: int, inputs: int) -> ChosenLayer:
    """The layer and input that the command line names."""
    if demo:
        if layer is not None:
            raise InputError(f"both --demo and the file {str(layer)!r} were given; choose one")
        subjects = demo_subjects(inputs)
        if not 0 <= demo_layer < len(subjects):
            raise InputError(f"--demo-layer is {demo_layer}; the demo model has layers 0 to {len(subjects) - 1}")
        return subjects[demo_layer]
    if layer is None:
        raise InputError("no layer was given; pass a safetensors file (and one with its input), or --demo")
    tensors = read_tensors(layer)
    given = tensors if x is None else read_tensors(x)
    if "x" not in given:
        source, found = str(x or layer), ", ".join(sorted(given)) or "nothing"
        raise InputError(f"{source}: no tensor named x; found {found}; save the input under the name x")
    point = given["x"]
    if point.ndim < 2 or 0 in point.shape:
        raise InputError(f"{x or layer}: x has shape {tuple(point.shape)}; expected (…, n, d), and at least one input")
    if point.ndim == 2:
        point = point.unsqueeze(0)
    subject = ChosenLayer(layer.name, AttentionLayer.from_tensors(tensors, source=str(layer)), point.flatten(0, -3))
    return subject.part(0, min(inputs, len(subject.x)))


def demo_subjects(inputs: int) -> list[ChosenLayer]:
    """The attention layers of the bundled model, at what enters them for the first test digits."""
    entering = load_digits_vit().attention_inputs(demo_digits().images[:inputs])
    return [ChosenLayer(name, AttentionLayer.from_module(module), x) for name, (module, x) in entering.items()]


def read_eps(text: str) -> list[float]:
    """Radii from "0.01,0.1"."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--eps is {text!r}; expected numbers separated by commas, such as 0.01,0.1") from None
