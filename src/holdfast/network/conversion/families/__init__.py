"""The model classes that `to_network` knows: importing a file registers them."""

from holdfast.network.conversion.families import bert, digits, distilbert, timm, vit
from holdfast.network.conversion.families.torch import read_wrapper

__all__ = ["bert", "digits", "distilbert", "read_wrapper", "timm", "vit"]
