"""From bounds of pieces to radii of networks: one file for each composition, one registration line for each."""

# Compositions are listed in the order in which they are registered here.
# isort: off
from holdfast.compositions.base import Composition, Radii, compositions, register_composition
from holdfast.compositions.lofast import LofastComposition
from holdfast.compositions.gains import Gains
from holdfast.compositions.layerwise import Layerwise
from holdfast.compositions.end_to_end import EndToEnd
from holdfast.compositions.margin_gradient import MarginGradient
from holdfast.compositions.telescoped.composition import Telescoped
from holdfast.compositions.forms.composition import Forms
from holdfast.compositions.best import BestComposition
from holdfast.compositions.certify import Certified, certify_inputs, proves
# isort: on

__all__ = [
    "BestComposition",
    "Certified",
    "Composition",
    "EndToEnd",
    "Forms",
    "Gains",
    "Layerwise",
    "LofastComposition",
    "MarginGradient",
    "Radii",
    "Telescoped",
    "certify_inputs",
    "compositions",
    "proves",
    "register_composition",
]
