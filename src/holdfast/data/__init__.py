"""Data sets, read from their standard files: `load(name, split)`."""

from holdfast.data import cifar10, digits, sst2, svhn  # each registers its data sets
from holdfast.data.dataset import Dataset, data_folder
from holdfast.data.sources import SOURCES, Source, load
from holdfast.data.sst2 import Vocabulary, vocabulary

__all__ = [
    "SOURCES",
    "Dataset",
    "Source",
    "Vocabulary",
    "cifar10",
    "data_folder",
    "digits",
    "load",
    "sst2",
    "svhn",
    "vocabulary",
]
