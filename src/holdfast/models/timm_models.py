"""Models of timm, with weights from its cache, from a file, or random."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.errors import InputError
from holdfast.extras import require
from holdfast.models.pretrained import one_line
from holdfast.storage import read_tensors


def load_timm(timm: Any, model: str, download: bool) -> nn.Module:
    """The model that timm:NAME, timm:NAME:FILE or timm:NAME:random names."""
    name, _, weights = model.removeprefix("timm:").partition(":")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:3]
        raise InputError(f"timm has no model {name!r}" + (f"; some it has: {', '.join(near)}" if near else ""))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if weights == "random":
            network = timm.create_model(name)
        else:
            file = weights or _weights_file(timm, name, download)
            network = _fill(timm, name, file)
    loaded: nn.Module = network
    return loaded.eval().requires_grad_(False)


def _fill(timm: Any, name: str, file: str) -> Any:
    """The model with the weights of a safetensors file."""
    network = timm.create_model(name)
    try:
        network.load_state_dict(read_tensors(file))
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file!r} does not hold the weights of {name!r}: {reason}") from error
    return network


def _weights_file(timm: Any, name: str, download: bool) -> str:
    """The file of the pretrained weights, from the Hugging Face cache."""
    hub, repository = require("huggingface_hub", "hf"), timm.get_pretrained_cfg(name).hf_hub_id
    with one_line(f"timm:{name}", download):
        if repository and download:
            return str(hub.hf_hub_download(repository, "model.safetensors"))
        file = hub.try_to_load_from_cache(repository, "model.safetensors") if repository else None
    if isinstance(file, str):
        return file
    raise InputError(
        f"the weights of timm's {name!r} are not in the Hugging Face cache; allow the download, or give "
        f"'timm:{name}:FILE.safetensors' or 'timm:{name}:random'"
    )
