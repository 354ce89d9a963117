"""A network at an input: the input of every piece, how far rounding may have led astray, and the prediction.

Evaluating a network in balls is sound and cheap, but blind: radii grow with |W|, not with ‖W‖. Where they would hide
more than a trace of a margin, each piece is evaluated in balls at the float64 tensor ũ_k alone, which gives its local
defect d_k >= ‖f_k(ũ_k) - ũ_{k+1}‖_F, and the defects travel by gains (docs/math/network.md, Lemma 1):

    r_{k+1} = L_k r_k + d_k >= ‖u_{k+1} - ũ_{k+1}‖_F,    L_k a bound of ‖Df_k‖ on the ball of radius r_k around ũ_k.

Tangents and adjoints travel in the same way (Lemma 2), with one more term where Df_k is taken at ũ_k instead of u_k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import HoldfastError, InputError, MemoryLimitError
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import UNIT, as_ball, frobenius_upper, outward
from holdfast.linalg.threat import L2, LINF, Threat
from holdfast.network.network import Network, Residual
from holdfast.network.site import LARGE, Site
from holdfast.results import Guarantee

_CHUNK = 2**22  # numbers that are pushed through a piece together
_NEGLIGIBLE = 1e-9  # a relative error of a stage's output that no radius will feel
_TRACE = 1e-4  # the share of a margin that rounding may hide


@dataclass(frozen=True)
class Enclosed:
    """Tangents or adjoints (t, b, n, d) in float64, and a bound of their distance from the exact ones.

    The bound is of the Frobenius norm, (b) over all t together or (t, b) for each.
    """

    value: Float64[Tensor, "t b n d"]
    error: Tensor


@final
class Stage:
    """One stage of the network at the centre: a chain of sites, v = f_P ∘ … ∘ f_1, giving v(u) or u + v(u)."""

    def __init__(self, sites: Sequence[Site], skip: bool, a: Arithmetic[Any], memory_limit: float) -> None:
        self.sites, self.skip, self._a, self._memory_limit = tuple(sites), skip, a, memory_limit

    @property
    def smooth(self) -> bool:
        return all(site.smooth for site in self.sites)

    @property
    def linear(self) -> bool:
        return not self.skip and all(isinstance(site.piece, LinearPiece) for site in self.sites)

    def gain(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of the stage's Jacobian on the ball of radius rho around its exact input."""
        if not self.skip and len(self.sites) == 1:
            return self.sites[0].gain(rho)
        L, B = self._branch(rho)
        plain = L + 1.0 if self.skip else L
        return outward(torch.minimum(plain, self.norm + rho * B))

    def curvature(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of the stage's second derivative there; the identity beside the branch adds none."""
        return self._branch(rho)[1]

    def reach(self, rho: Float64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """A bound of how far the stage's output moves; the only constant that a stage with a kink has."""
        moved = rho
        for site in self.sites:
            moved = site.reach(moved)
        if not self.skip:
            return moved
        plain = outward(rho + moved)
        if not self.smooth:
            return plain
        bent = outward(self.norm * rho + rho.square() * self.curvature(rho) / 2)
        return torch.minimum(plain, bent)

    def _branch(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and curvature of the chain: L ← L_p L, B ← β_p L² + L_p B."""
        L, B = torch.ones_like(rho), torch.zeros_like(rho)
        for site in self.sites:
            gain = site.gain(rho)
            B = outward(site.curvature(rho) * L.square() + gain * B)
            L = outward(gain * L)
            rho = site.reach(rho)
        return L, B

    @cached_property
    def norm(self) -> Float64[Tensor, "b 1"]:
        """A bound of the norm of the stage's Jacobian at its exact input."""
        try:
            unit = identity(self.sites[0].u, self._memory_limit)
        except MemoryLimitError:
            return torch.full_like(self.sites[0].r, torch.inf).unsqueeze(-1)
        return matrix_norm(self._a, self.push(unit))

    def push(self, tangents: Enclosed) -> Enclosed:
        """The stage's Jacobian at its exact input, applied to tangents."""
        out = tangents
        for site in self.sites:
            out = pushed(site, out)
        return added(tangents, out) if self.skip else out


@final
@dataclass
class _Deadline:
    """The `time.monotonic()` that all centres of one certificate look at."""

    moment: float


@final
class _Clock:
    """Tells whether a deadline is over, once what is always done has been: until then it is not."""

    def __init__(self, deadline: _Deadline) -> None:
        self.deadline, self.begun = deadline, False

    def overdue(self) -> bool:
        return self.begun and time.monotonic() > self.deadline.moment


@final
class _Slopes:
    """The first-order radii of a network at some inputs."""

    def __init__(self, network: Network, x: Float64[Tensor, "b n d"]) -> None:
        self._network, self._x = network, x

    @cached_property
    def radius(self) -> Float64[Tensor, " b"]:
        return self.under(L2)

    def lost(self, eps: Float64[Tensor, " b"], half: Float64[Tensor, "b n d"] | None) -> Float64[Tensor, " b"]:
        x = self._x.clone().requires_grad_()
        with torch.enable_grad():
            top = self._network(x).topk(2, -1).values
            (slope,) = torch.autograd.grad((top[:, 0] - top[:, 1]).sum(), x)
        return eps * (L2.steepness(slope) if half is None else LINF.steepness(slope * half))

    def under(self, threat: Threat) -> Float64[Tensor, " b"]:
        x = self._x.clone().requires_grad_()
        with torch.enable_grad():
            top = self._network(x).topk(min(3, len(self._network.head.bias)), -1).values
            leads = top[:, :1] - top[:, 1:]
            slopes = [torch.autograd.grad(lead.sum(), x, retain_graph=True)[0] for lead in leads.unbind(-1)]
        radii = leads.detach() / torch.stack([threat.steepness(slope) for slope in slopes], -1)
        least = radii.amin(-1)
        return torch.where(torch.isfinite(least) & (least > 0), least, 1.0)


@final
class Centre:
    """A network at a batch of inputs. None of its parts refers to it, so it is freed as soon as it is no longer used.

    Args:
        network: the classifier.
        x: (b, n, d) the inputs; float32 or float64, taken as exact.
        guarantee: "proved", or "numerical" for plain float64 and iterated norms.
        memory_limit: bytes that one dense Jacobian, or one proved norm, may hold.
        like: a centre whose network may differ in its first piece alone; what they share is computed once.
        deadline: the `time.monotonic()` from which on nothing that takes long is begun; the prediction is always made.
        dense: whether dense Jacobians of large stages may tell what rounding did, where no lead is proved without.

    Attributes:
        a: the arithmetic of what concerns no single piece; compositions keep there what they share.
        stages: the stages where they stand.
        prediction: (b) the class of the largest logit.
        margins: (b, classes) lower bounds of f_y - f_j at the exact inputs; infinite for j = y.
        margin: (b) the smallest of them.
        pairs: (classes, b, 1, d) the rows w_y - w_j of the head, which are the margins' gradients at the features.
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        *,
        guarantee: Guarantee = "proved",
        memory_limit: float = 4 * GIB,
        like: Centre | None = None,
        deadline: float | _Deadline = math.inf,
        dense: bool = False,
    ) -> None:
        if x.ndim != 3 or not x.is_floating_point():
            raise InputError(f"inputs have shape {tuple(x.shape)} and dtype {x.dtype}; expected floats (b, n, d)")
        network.check_classes()
        self.network, self.x, self.guarantee, self._memory_limit = network, x.detach().double(), guarantee, memory_limit
        self._clock = _Clock(deadline if isinstance(deadline, _Deadline) else _Deadline(deadline))
        self._slopes = _Slopes(network, self.x)
        self.a, self.like, self._dense = self.arithmetic(), like, dense
        with torch.no_grad():
            blind = not self.proved or self.x.shape[-2] * self.x.shape[-1] <= LARGE
            if blind:
                self._walk_blindly()
            if self.proved and not (blind and bool((self._hidden <= _TRACE * self.margins).all())):
                self._walk_by_gains()
                self._clock.begun = True
                if dense and not bool((self.margin > 0).all()):
                    with suppress(HoldfastError):  # time, memory, overflow: what was walked before stays
                        self._walk_by_gains(dense=True)
        self._clock.begun = True

    @property
    def proved(self) -> bool:
        return self.guarantee == "proved"

    @cached_property
    def numerical(self) -> Centre:
        """The same without a proof: for guesses of what can be proved."""
        return self._again(self.x, "numerical")

    @property
    def separable(self) -> bool:
        """Whether no piece holds something for each input, such as its mask: an input then has answers of its own."""
        with torch.no_grad():
            return len(self.network(self.x[:1])) == 1

    def alone(self) -> Iterator[Centre]:
        """Every input by itself; one that is done with need not be kept."""
        return (self.at(x) for x in torch.split(self.x, 1))

    def at(self, x: Float64[Tensor, "b n d"]) -> Centre:
        """The network at other inputs."""
        return self._again(x, self.guarantee)

    def _again(self, x: Tensor, guarantee: Guarantee) -> Centre:
        limit, deadline = self._memory_limit, self._clock.deadline
        return Centre(self.network, x, guarantee=guarantee, memory_limit=limit, deadline=deadline, dense=self._dense)

    @property
    def overdue(self) -> bool:
        """Whether the deadline is over, for all that comes after the prediction."""
        return self._clock.overdue()

    @property
    def deadline(self) -> float:
        return self._clock.deadline.moment

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Inside, only this share of the time that is left may be used."""
        whole, now = self.deadline, time.monotonic()
        self._clock.deadline.moment = min(whole, now + share * (whole - now))
        try:
            yield
        finally:
            self._clock.deadline.moment = whole

    def arithmetic(self) -> Arithmetic[Any]:
        """A fresh arithmetic: it keeps what one piece has computed, so no two pieces share one."""
        asked = bool if self.deadline == math.inf else self._clock.overdue
        return Proved(self._memory_limit, asked) if self.proved else Numerical(overdue=asked)

    def _walk_blindly(self) -> None:
        """Through all stages in balls: hardly ever enough for large inputs."""
        u, stages = Ball.exact(self.x), []
        for stage in self.network.stages:
            v, sites = u, []
            for piece in _pieces(stage):
                sites.append(self._site(piece, v.mid, _length(v.rad)))
                v = piece.value(v) if self.proved else Ball.exact(piece.value(v.mid))
            stages.append(self._stage(sites, stage))
            u = u + v if stages[-1].skip else v
        self._arrive(stages, u.mid, _length(u.rad))

    def _walk_by_gains(self, *, dense: bool = False) -> None:
        """The same with local defects, which travel by gains: by dense norms of large stages, too, where `dense`."""
        u, r, stages = self.x, torch.zeros_like(self.x[:, 0, 0]), []
        for stage in self.network.stages:
            v, e, local, sites = u, r, torch.zeros_like(r), []
            for piece in _pieces(stage):
                site = self._site(piece, v, e)
                out = piece.value(Ball.exact(v))
                v, defect = out.mid, _length(out.rad)
                e, local = outward(site.astray(e) + defect), outward(site.astray(local) + defect)
                local = torch.minimum(local, e)  # e holds for every input within r: that is one of them
                sites.append(site)
            stages.append(self._stage(sites, stage))
            u, r = self._joined(stages[-1], u, r, v, e, local, dense) if stages[-1].skip else (v, e)
        self._arrive(stages, u, r)

    def _joined(
        self, stage: Stage, u: Tensor, r: Tensor, v: Tensor, e: Tensor, local: Tensor, dense: bool
    ) -> tuple[Tensor, Tensor]:
        """U + v, where e bounds the error of v and `local` what it would be with r = 0."""
        out, astray = Ball.exact(u) + v, r + e
        # The identity and the branch may cancel; worth a dense Jacobian only where the error is not yet negligible.
        affordable = dense or not stage.sites[0].large
        little = bool((r == 0).all()) if dense else bool((astray <= _NEGLIGIBLE * _length(out.mid)).all())
        if stage.smooth and affordable and not little:
            astray = torch.minimum(astray, stage.gain(r.unsqueeze(-1)).squeeze(-1) * r + local)
        return out.mid, outward(astray + _length(out.rad))

    def _site(self, piece: Piece, u: Tensor, r: Tensor) -> Site:
        slopes = self._slopes
        return Site(piece, u, r, lambda: slopes.radius, self.arithmetic())

    def _stage(self, sites: Sequence[Site], stage: Piece | Residual) -> Stage:
        return Stage(sites, isinstance(stage, Residual), self.arithmetic(), self._memory_limit)

    def _arrive(self, stages: Sequence[Stage], z: Tensor, r: Tensor) -> None:
        """Decides at features that are within r of z."""
        head, a = self.network.head, self.a
        self.stages = tuple(stages)
        self.prediction = y = head.logits(z).argmax(-1)
        W, c = a.lift(head.weight.to(z)), a.lift(head.bias.to(z))
        differences = W[y].unsqueeze(-2) - W  # (b, classes, d)
        value = as_ball((differences @ a.lift(z.mT)).squeeze(-1) + (c[y].unsqueeze(-1) - c))
        D = as_ball(differences)
        lengths = frobenius_upper(D.mid, (-1,)) + frobenius_upper(D.rad, (-1,))
        own = torch.nn.functional.one_hot(y, len(head.bias)).bool()
        self._hidden = outward(lengths * r.unsqueeze(-1))
        self.margins = (value - self._hidden).lower.masked_fill(own, torch.inf)
        self.margin = self.margins.amin(-1)
        self.pairs = Enclosed(D.mid.movedim(1, 0).unsqueeze(-2), frobenius_upper(D.rad, (-1,)).mT)

    # -- derivatives at the exact input

    def identity(self, stage: int) -> Enclosed:
        """The unit directions at the input of a stage."""
        return identity(self.stages[stage].sites[0].u, self._memory_limit)

    def norm(self, tangents: Enclosed) -> Float64[Tensor, "b 1"]:
        """A bound of the norm of each input's matrix, whose rows are the tangents."""
        return matrix_norm(self.a, tangents)

    @property
    def head_radius(self) -> Float64[Tensor, " b"]:
        """An estimate, at which a search begins: the first-order radius of a network with slope 1 before its head."""
        least = (self.margins / lengths(self.pairs).squeeze(-1)).amin(-1)
        return torch.where(torch.isfinite(least) & (least > 0), least, 1.0)

    @property
    def first_order_radius(self) -> Float64[Tensor, " b"]:
        """An estimate, at which a search begins: where the lead over one of two other classes ends, to first order."""
        return self._slopes.radius

    def first_order(self, threat: Threat) -> Float64[Tensor, " b"]:
        """The same for perturbations of another kind."""
        return self._slopes.under(threat)

    def first_order_lost(
        self, eps: Float64[Tensor, " b"], half: Float64[Tensor, "b n d"] | None = None
    ) -> Float64[Tensor, " b"]:
        """What first order takes off the lead over the second class, in balls or in boxes with half-widths eps · half.

        In plain float64: it explains a radius, and proves nothing.
        """
        return self._slopes.lost(eps, half)


def _pieces(stage: Piece | Residual) -> tuple[Piece, ...]:
    return stage.pieces if isinstance(stage, Residual) else (stage,)


def _length(x: Float64[Tensor, "b n d"]) -> Float64[Tensor, " b"]:
    """An upper bound of every input's Frobenius norm; 0 where there is nothing."""
    return torch.where((x == 0).all(-1).all(-1), 0.0, frobenius_upper(x))


def identity(u: Float64[Tensor, "b n d"], memory_limit: float) -> Enclosed:
    """The n d unit directions at u, for every input of the batch."""
    b, n, d = u.shape
    need = 8.0 * 6 * b * (n * d) ** 2
    if need > memory_limit:
        raise MemoryLimitError(
            f"the Jacobian of {b} inputs of {n} x {d} numbers needs about {need / GIB:.1f} GiB and the limit is "
            f"{memory_limit / GIB:.1f} GiB; raise memory_limit, or certify fewer inputs at once"
        )
    eye = torch.eye(n * d, dtype=torch.float64, device=u.device).reshape(n * d, 1, n, d)
    return Enclosed(eye.expand(n * d, b, n, d), torch.zeros(b, dtype=torch.float64, device=u.device))


def matrix_norm(a: Arithmetic[Any], tangents: Enclosed) -> Float64[Tensor, "b 1"]:
    """A bound of the norm of each input's matrix, whose rows are the tangents."""
    matrices = tangents.value.flatten(-2, -1).movedim(0, 1)
    return outward(a.number(a.matrix_norm(a.lift(matrices))) + tangents.error).unsqueeze(-1)


def lengths(adjoints: Enclosed) -> Float64[Tensor, "b classes 1"]:
    """Bounds of the lengths of adjoints (classes, b, n, d)."""
    return outward(frobenius_upper(adjoints.value) + adjoints.error).mT.unsqueeze(-1)


def pushed(site: Site, tangents: Enclosed) -> Enclosed:
    """Df(u) applied to tangents."""
    return _applied(site, site.smooth_piece.push, tangents, (0, 2, 3))


def pulled(site: Site, adjoints: Enclosed) -> Enclosed:
    """Df(u)ᵀ applied to adjoints, each with its own error."""
    return _applied(site, site.smooth_piece.pull, adjoints, (2, 3))


def added(left: Enclosed, right: Enclosed) -> Enclosed:
    """The sum of tangents, or of adjoints."""
    value = left.value + right.value
    rounding = frobenius_upper(value, (0, 2, 3) if left.error.ndim == 1 else (2, 3)) * (2 * UNIT)
    return Enclosed(value, outward(left.error + right.error + rounding))


def _applied(site: Site, apply: Callable[[Any, Any], Any], t: Enclosed, dims: tuple[int, ...]) -> Enclosed:
    """A linear map that depends on u, taken at ũ: the local defect, the distance of ũ from u, the error so far."""
    b, n, d = site.u.shape
    chunks = torch.split(t.value, max(1, _CHUNK // (b * n * max(n, d))))
    site.a.in_time()
    if not site.proved:
        return Enclosed(torch.cat([apply(site.u, chunk) for chunk in chunks]), t.error)
    u, values, radii = Ball.exact(site.u), list[Tensor](), list[Tensor]()
    for chunk in chunks:
        ball = apply(u, Ball.exact(chunk))
        values.append(ball.mid)
        radii.append(frobenius_upper(ball.rad, (2, 3)))  # the radii themselves are as large as the values
    rad = torch.cat(radii)
    turned = site.curvature_here * site.r * frobenius_upper(t.value, dims)
    error = (frobenius_upper(rad, (0,)) if 0 in dims else rad) + turned + site.gain_here * t.error
    return Enclosed(torch.cat(values), outward(error))
