"""One word for a network: which pieces it is made of, with all their numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.network.network import Network


def weights_digest(network: Network) -> str:
    """SHA-256 of what a network is made of: the kinds of its pieces, in order, with all their numbers.

    A kind is the name of a class, wherever it is defined. A renamed class keeps the digests of stored runs by stating
    its old name: `kind = "Affine"` in its body.
    """
    digest = hashlib.sha256()
    _feed(digest, network.stages)
    _feed(digest, network.head)
    return digest.hexdigest()


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        _feed(digest, (str(value.dtype), *value.shape))
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, Mapping):
        _feed(digest, tuple(sorted(value.items())))
    elif isinstance(value, Sequence):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    elif callable(value) and hasattr(value, "__name__"):
        _feed(digest, value.__name__)
    else:
        kind = type(value)
        digest.update(f"{vars(kind).get('kind', kind.__name__)} ".encode())
        # What is computed from the rest on first use adds nothing.
        computed = {name for base in kind.__mro__ for name, v in vars(base).items() if isinstance(v, cached_property)}
        _feed(digest, {name: attribute for name, attribute in vars(value).items() if name not in computed})
