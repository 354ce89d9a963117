"""What the library returns: frozen objects that say how far they can be trusted.

`side` is "upper" (a bound), "lower" (attained by a witness) or "estimate" (neither). `guarantee` is "proved" (float64,
rounded outward) or "numerical" (the formula is a theorem, but a number in it came from an iteration or plain rounding).
"""

from holdfast.results.kinds import Guarantee, Norm, Scope, Side, brief
from holdfast.results.layers import AttackResult, BoundResult, LipschitzResult, LipschitzWitness, NormResult
from holdfast.results.losses import LOSSES, mean_shares
from holdfast.results.records import UNDECIDED, Certificate, RadiusEstimate, RadiusRecord
from holdfast.results.run import CertificationRun, Target
from holdfast.results.shares import at_least, at_most

__all__ = [
    "LOSSES",
    "UNDECIDED",
    "AttackResult",
    "BoundResult",
    "Certificate",
    "CertificationRun",
    "Guarantee",
    "LipschitzResult",
    "LipschitzWitness",
    "Norm",
    "NormResult",
    "RadiusEstimate",
    "RadiusRecord",
    "Scope",
    "Side",
    "Target",
    "at_least",
    "at_most",
    "brief",
    "mean_shares",
]
