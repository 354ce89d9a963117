"""A low-bit cache of keys and values: how far it can move a layer's output, and how many bits a layer needs."""

from holdfast.cache.bits import BitsTable, cache_bits
from holdfast.cache.error import CacheError, cache_error
from holdfast.cache.quantise import Quantiser

__all__ = ["BitsTable", "CacheError", "Quantiser", "cache_bits", "cache_error"]
