"""Small trained models that come with the package, and certifiable transformers built from a config."""

from holdfast.data.digits import Digits, demo_digits
from holdfast.models.config import ModelConfig, config, named_configs, read_config
from holdfast.models.digits import DigitsViT, load_digits_vit
from holdfast.models.files import load, save
from holdfast.models.shelf import Shelved, put_on_shelf, shelved
from holdfast.models.transformer import Transformer
from holdfast.models.vit import VisionTransformer

__all__ = [
    "Digits",
    "DigitsViT",
    "ModelConfig",
    "Shelved",
    "Transformer",
    "VisionTransformer",
    "config",
    "demo_digits",
    "load",
    "load_digits_vit",
    "named_configs",
    "put_on_shelf",
    "read_config",
    "save",
    "shelved",
]
