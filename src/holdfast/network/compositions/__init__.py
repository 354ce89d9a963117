"""From bounds of pieces to radii of networks: one file for each composition, one registration line for each."""

# Compositions are listed in the order in which they are registered here.
# isort: off
from holdfast.network.compositions.base import Composition, Radii, compositions, register_composition
from holdfast.network.compositions.lofast import LofastComposition
from holdfast.network.compositions.gains import Gains
from holdfast.network.compositions.layerwise import Layerwise
from holdfast.network.compositions.end_to_end import EndToEnd
from holdfast.network.compositions.margin_gradient import MarginGradient
from holdfast.network.compositions.telescoped import Telescoped
from holdfast.network.compositions.forms import Forms
from holdfast.network.compositions.best import BestComposition
from holdfast.network.compositions.certify import Certified, certify_inputs, proves
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
