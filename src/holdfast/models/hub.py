"""Models on the Hugging Face hub, or in a folder laid out as there, by huggingface_hub where it is installed."""

from __future__ import annotations

import os
import types
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import nn

from holdfast.errors import InputError
from holdfast.extras import require
from holdfast.storage import Pathlike, read_tensors, write_tensors

_WEIGHTS = "model.safetensors"
_README = """---
{{ card_data }}
---

A model of Holdfast, which proves how far the input of a transformer may move before its answer can change.

```python
from holdfast.models import CLASS

model = CLASS.from_pretrained("this folder, or the name of this repository")
```

This page does not say what is proved about these weights. `holdfast certify model.safetensors --data NAME` proves it,
and `holdfast models card` writes a card with all that is known about a trained model.
"""


class OnHub(nn.Module):
    """A model that loads and saves through huggingface_hub's `PyTorchModelHubMixin`; weights are only ever safetensors.

    Example:
        >>> model.save_pretrained("folder")
        >>> VisionTransformer.from_pretrained("folder")
    """

    @property
    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What the model is built from, ready for JSON."""

    @classmethod
    def built(cls, arguments: Mapping[str, Any], source: str) -> Self:
        """The model that is built from such arguments, which come from `source`."""
        try:
            return cls(**arguments)
        except TypeError as error:
            raise InputError(f"{source} does not describe a {cls.__name__}: {error}") from None

    @property
    def notes(self) -> dict[str, str]:
        """Metadata of the file of weights."""
        return {}

    @classmethod
    def from_pretrained(cls, name: Pathlike, **options: Any) -> Self:
        """The model in a folder, or of that name on the hub, in evaluation mode.

        Args:
            name: of the folder or of the repository.
            options: what huggingface_hub takes, such as revision, cache_dir and local_files_only.
        """
        loaded: Self = _through_mixin(cls).from_pretrained(os.fspath(name), **options)
        return loaded

    def save_pretrained(self, folder: Pathlike, **options: Any) -> None:
        """Writes model.safetensors, config.json and README.md into a folder; options as huggingface_hub takes them."""
        self._vehicle().save_pretrained(os.fspath(folder), **options)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Puts the same files into a repository of the hub; options as huggingface_hub takes them."""
        address: str = self._vehicle().push_to_hub(name, **options)
        return address

    def _vehicle(self) -> Any:
        """The same model with the mixin."""
        mixed = _through_mixin(type(self)).built(self.arguments, "the model")
        mixed.load_state_dict(self.state_dict())
        return mixed


def _through_mixin(kind: type[OnHub]) -> Any:
    """The class with the mixin before it; what is loaded by it is of the class itself."""
    hub = require("huggingface_hub", "hf")

    def save(self: OnHub, save_directory: Path) -> None:
        write_tensors(save_directory / _WEIGHTS, self.state_dict(), self.notes)

    def load(_: Any, /, *, model_id: str, **given: Any) -> OnHub:
        names = ("revision", "cache_dir", "force_download", "local_files_only", "token")
        options = {name: given.pop(name) for name in names if name in given}
        folder = Path(model_id)
        try:
            file = folder / _WEIGHTS if folder.is_dir() else hub.hf_hub_download(model_id, _WEIGHTS, **options)
        except hub.errors.EntryNotFoundError:
            raise InputError(f"{model_id} holds no {_WEIGHTS}; expected weights as safetensors") from None
        model = kind.built(given.pop("config", given), f"config.json of {model_id}")
        try:
            model.load_state_dict(read_tensors(file))
        except RuntimeError as error:
            raise InputError(f"{model_id}: the tensors do not fit config.json: {error}") from None
        return model.eval()

    members = {"_save_pretrained": save, "_from_pretrained": classmethod(load)}
    card = {
        "library_name": "holdfast",
        "license": "apache-2.0",
        "tags": ["certified-robustness"],
        "model_card_template": _README.replace("CLASS", kind.__name__),
    }
    return types.new_class(kind.__name__, (hub.PyTorchModelHubMixin, kind), card, lambda body: body.update(members))
