"""Every attention layer of a model, analysed and shown."""

from holdfast.analysis.result import AnalysedInput, AnalysedLayer, Analysis
from holdfast.analysis.run import Progress, analyze

__all__ = ["AnalysedInput", "AnalysedLayer", "Analysis", "Progress", "analyze"]
