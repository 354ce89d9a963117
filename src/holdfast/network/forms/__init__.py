"""Margins over an l2 ball or a box by quadratic forms (docs/math/forms.md).

How others use it:

    forms = Margins(network, x)                  # x (n, d): an l2 ball around it
    forms = Margins(network, x, shape=h)         # the box |G| <= scale · h around it, h (n, d)
    forms.at(scale)                              # Lower: .least, .margins (classes), .losses by name
    margins_over_box(network, lower, upper)      # Lower: every margin between lower and upper ends, (n, d) each

A margin that is positive proves that the prediction at the centre (`forms.prediction`) stands on the whole region.
`refusal(network)` says why there is no proof for a network, or None.
"""

from holdfast.network.forms.margins import Lower, Margins, margins_over_box, refusal

__all__ = ["Lower", "Margins", "margins_over_box", "refusal"]
