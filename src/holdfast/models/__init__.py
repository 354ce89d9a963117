"""Small trained models that come with the package, so that every command has something real to analyse."""

from holdfast.models.digits import Digits, DigitsViT, demo_digits, load_digits_vit

__all__ = ["Digits", "DigitsViT", "demo_digits", "load_digits_vit"]
