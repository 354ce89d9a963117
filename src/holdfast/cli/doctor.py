"""`doctor`: what this installation has."""

from __future__ import annotations

import os
import platform
from importlib import metadata, util

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.cli.inputs import Json
from holdfast.cli.work import emit_json
from holdfast.version import __version__

_EXTRAS = {
    "hf": ("transformers", "accelerate"),
    "onnx": ("onnx", "onnxruntime"),
    "vision": ("torchvision", "timm"),
    "demo": ("sklearn",),
    "data": ("scipy",),
    "cluster": ("ray",),
    "notebook": ("pandas",),
}
_ADDS = {
    "hf": "Hugging Face models and tokenizers, training on several devices",
    "onnx": "ONNX models, VNN-LIB specifications",
    "vision": "timm models, image files",
    "demo": "all 1,797 digits; the demo's 32 come with the package",
    "data": "SVHN",
    "cluster": "certify on many machines (--cluster)",
    "notebook": "to_dataframe",
}
_DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def doctor(as_json: Json = False) -> None:
    """Show versions, devices, threads, and which extras are installed."""
    facts: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "safetensors": metadata.version("safetensors"),
        "devices": ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))],
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "extras": {extra: {name: _version(name) for name in names} for extra, names in _EXTRAS.items()},
    }
    if as_json:
        emit_json("doctor", facts, stdout=True, out=None)
        return
    table = Table("what", "found", title=f"holdfast {__version__}")
    for name, value in facts.items():
        if isinstance(value, dict):
            for extra, packages in value.items():
                parts = (f"{package} {version or 'not installed'}" for package, version in packages.items())
                table.add_row(f"extra {extra}", ", ".join(parts))
                if None in packages.values():
                    table.add_row("", escape(f"pip install 'holdfast[{extra}]' adds: {_ADDS[extra]}"))
        else:
            table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table)


def _version(module: str) -> str | None:
    """The version of an optional package, without importing it."""
    if util.find_spec(module) is None:
        return None
    return metadata.version(_DISTRIBUTIONS.get(module, module))
