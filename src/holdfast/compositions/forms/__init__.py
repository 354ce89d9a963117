"""Margins over an l2 ball or a box by quadratic forms (docs/math/forms.md).

How others use it:

    forms = Margins(network, x)                  # x (n, d): an l2 ball around it
    forms = Margins(network, x, shape=h)         # the box |G| <= scale · h around it, h (n, d)
    forms.at(scale)                              # Lower: .least, .margins (classes), .losses by name
    forms.largest(precision)                     # about the largest scale at which all margins are positive
    margins_over_box(network, lower, upper)      # Lower: every margin between lower and upper ends, (n, d) each
    margins_over_parts(network, lower, upper, seconds)   # the same, in .parts if one centre does not suffice

A margin that is positive proves that the prediction at the centre (`forms.prediction`) stands on the whole region.
`refusal(network)` says why there is no proof for a network, or None.
"""

from holdfast.compositions.forms.kinds import refusal
from holdfast.compositions.forms.margins import Margins
from holdfast.compositions.forms.parts import margins_over_box, margins_over_parts
from holdfast.compositions.forms.settled import Lower

__all__ = ["Lower", "Margins", "margins_over_box", "margins_over_parts", "refusal"]
