"""Where a family of classifiers keeps its parts: data, not code. One file for each family in `families/`.

Paths lead from the model in a `Classifier`, from the encoder in an `Encoder`, from each block in a `Block`. An optional
part that is absent, None or nn.Identity does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from holdfast.registry import Registry


@dataclass(frozen=True)
class Embedding:
    """How inputs become tokens.

    Attributes:
        map: of the input: a convolution makes tokens of an image's patches, an nn.Embedding of words, an nn.Linear of
            vectors (b, n, c); where it is absent, vectors are tokens already.
        patch: side of the patches, where an nn.Linear embeds those of a grey image (b, height, width).
        tokens: parameters that stand in front as tokens of their own, in order.
        positions: the parameter that is added: to every token, or to those of the input alone if it has their number.
        added: modules whose outputs are added to the words, whatever they depend on; it must not be the words.
        norm: the LayerNorm at the end.
    """

    map: str
    patch: int | None = None
    tokens: tuple[str, ...] = ()
    positions: str | None = None
    added: tuple[str, ...] = ()
    norm: str | None = None


@dataclass(frozen=True)
class Block:
    """One transformer block, attention and then an MLP, each added to its input.

    Attributes:
        attention: the module in which the kernel runs, as a family of `holdfast.tracing` describes it.
        norms: the LayerNorms of attention and MLP.
        mlp: its first map, its activation and its second map.
        norm_first: whether the norms stand before attention and MLP, not after the sum; or the attribute that says so.
        scales: a factor for every feature on each of the two branches (LayerScale).
    """

    attention: str
    norms: tuple[str, str]
    mlp: tuple[str, str, str]
    norm_first: bool | str
    scales: tuple[str, str] | None = None


@dataclass(frozen=True)
class Encoder:
    """Embedding and blocks; `norm` is the LayerNorm of every token at the end."""

    embedding: Embedding
    blocks: str
    block: Block
    norm: str | None = None


@dataclass(frozen=True)
class First:
    """Pooling: the first token alone goes on."""


@dataclass(frozen=True)
class Mean:
    """Pooling: the mean of all tokens but the first `skip`."""

    skip: int = 0


@dataclass(frozen=True)
class Norm:
    """A LayerNorm."""

    norm: str


@dataclass(frozen=True)
class Dense:
    """A linear map and an activation, given by path or, where the forward pass names it itself, by name."""

    map: str
    activation: str


Step = First | Mean | Norm | Dense


@dataclass(frozen=True)
class Classifier:
    """A whole model.

    Attributes:
        encoder: the path of a module whose own class is known, or the encoder's parts as paths from the model.
        steps: what happens to the encoder's tokens.
        head: the linear map to the logits.
        unused: parts that the logits do not depend on.
    """

    encoder: str | Encoder
    steps: tuple[Step, ...]
    head: str
    unused: tuple[str, ...] = ()


#: What is known of a class of models: a design, or a function that reads a classifier off the model's attributes.
Design = Encoder | Classifier | Callable[[nn.Module], Classifier]

designs: Registry[Design] = Registry("model class", group="holdfast.designs")


def register_design(package: str, classes: tuple[str, ...], design: Design) -> None:
    """Makes classes of models known to `to_network`.

    Args:
        package: whose classes they are.
        classes: their names; a subclass may compute something else and does not count.
        design: of their instances.

    Example:
        >>> register_design("transformers", ("BertForSequenceClassification",), Classifier("bert", …, "classifier"))
    """
    for name in classes:
        designs.add(f"{package}.{name}")(design)


def describe(module: nn.Module) -> Encoder | Classifier | None:
    """The design of a module of a known class, or None."""
    key = f"{type(module).__module__.split('.')[0]}.{type(module).__name__}"
    if key not in designs:
        return None
    design = designs[key]
    return design if isinstance(design, Encoder | Classifier) else design(module)
