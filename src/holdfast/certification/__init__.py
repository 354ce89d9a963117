"""Certificates for whole data sets: run, resume, split, merge, and verify."""

from holdfast.attacks.minimal import MinimalAttack, NearestChange
from holdfast.certification.examine import examine
from holdfast.certification.examples import Batch, Examples, read_examples
from holdfast.certification.join import merge
from holdfast.certification.recompute import Verification, verify
from holdfast.certification.runner import Shard, certify
from holdfast.certification.settings import Settings
from holdfast.certification.store import read

__all__ = [
    "Batch",
    "Examples",
    "MinimalAttack",
    "NearestChange",
    "Settings",
    "Shard",
    "Verification",
    "certify",
    "examine",
    "merge",
    "read",
    "read_examples",
    "verify",
]
