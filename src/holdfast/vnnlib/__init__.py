"""Specifications in the verification competition's language, and whether a network meets them."""

from holdfast.vnnlib.decide import Decision, Verdict, decide
from holdfast.vnnlib.reader import read_specification
from holdfast.vnnlib.specification import Box, OutputCase, Specification

__all__ = ["Box", "Decision", "OutputCase", "Specification", "Verdict", "decide", "read_specification"]
