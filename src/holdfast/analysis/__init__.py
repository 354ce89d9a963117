"""Every attention layer of a model, analyzed and shown."""

from holdfast.analysis.result import Analysis, AnalyzedInput, AnalyzedLayer
from holdfast.analysis.run import AnalysisProgress, analyze

__all__ = ["Analysis", "AnalysisProgress", "AnalyzedInput", "AnalyzedLayer", "analyze"]
