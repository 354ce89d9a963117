"""Points of a ball to try, cheaper than and independent of `holdfast.attack`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holdfast.attention.movement import distance

_STEPS = 8


def directions(layer: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> Tensor:
    """(m, b…, n, d) unit directions: any, one token alone, all tokens alike, and where the output moves fastest."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, *x.shape, generator=generator, dtype=torch.float64).to(x)
    n = x.shape[-2]
    one = torch.nn.functional.one_hot(torch.randint(n, (2,), generator=generator), n).to(x)
    one = one.reshape(2, *(1 for _ in x.shape[:-2]), n, 1)
    alike = normal[4:].mean(-2, keepdim=True).expand(2, *x.shape)
    return unit(torch.cat([normal[:2], one * normal[2:4], alike, _steepest(layer, x)]))


def _steepest(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(2, b…, n, d) the top singular vector of the Jacobian, and the top one of those alike for all tokens."""
    n, d = x.shape[-2:]
    basis = torch.eye(n * d, dtype=x.dtype, device=x.device).reshape(n * d, *(1 for _ in x.shape[:-2]), n, d)
    points, moves = (t.expand(n * d, *x.shape).contiguous() for t in (x, basis))
    columns = torch.func.jvp(layer, (points,), (moves,))[1]
    rows = columns.flatten(-2, -1).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).movedim(0, -2)  # (b…, n d, n d_out)
    any_token = torch.linalg.svd(rows, full_matrices=False).U[..., 0].unflatten(-1, (n, d))
    together = rows.unflatten(-2, (n, d)).sum(-3)
    alike = torch.linalg.svd(together, full_matrices=False).U[..., 0].unsqueeze(-2)
    return torch.stack([any_token, alike.expand(x.shape)])


def unit(v: Tensor) -> Tensor:
    """The directions of v; zero where it vanishes."""
    largest = v.abs().amax((-2, -1), keepdim=True)
    v = v / torch.where(largest > 0, largest, torch.inf)  # squares would underflow
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    direction: Tensor = v / torch.where(length > 0, length, torch.inf)
    return direction.nan_to_num(nan=0.0)


def inside(x: Tensor, z: Tensor, radii: Tensor) -> Tensor:
    """The points z, pulled a little towards x; x itself where they would still not be proved to lie in the ball."""
    z = x + (z - x) * (1 - 1e-9)
    return torch.where(distance(x, z).upper[..., None, None] <= radii, z, x)


def climb(value: Callable[[Tensor, Tensor], Tensor], radii: Tensor, moves: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Monotone ascent of value(moves, g) over ‖moves‖ <= radii and ‖g‖ = 1, from several starts side by side."""
    best, slope_z, slope_g = _slopes(value, moves, g)
    step = torch.ones_like(best)
    for _ in range(_STEPS):
        length = step[..., None, None]
        z_trial = _onto_ball(moves + radii * length * slope_z, radii)
        g_trial = unit(g + length * slope_g)
        tried, new_z, new_g = _slopes(value, z_trial, g_trial)
        gained = tried > best
        best, step = torch.where(gained, tried, best), torch.where(gained, step, step / 4)
        here = gained[..., None, None]
        moves, g = torch.where(here, z_trial, moves), torch.where(here, g_trial, g)
        slope_z, slope_g = torch.where(here, new_z, slope_z), torch.where(here, new_g, slope_g)
    return moves, g


def _slopes(value: Callable[[Tensor, Tensor], Tensor], moves: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value and the directions of its gradients."""
    with torch.enable_grad():
        moves, g = moves.detach().requires_grad_(), g.detach().requires_grad_()
        values = value(moves, g)
        slopes = torch.autograd.grad(values.sum(), (moves, g), materialize_grads=True)
    return values.detach().nan_to_num(nan=0.0), unit(slopes[0]), unit(slopes[1])


def _onto_ball(moves: Tensor, radii: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(moves, dim=(-2, -1), keepdim=True)
    return moves * (radii / length).clamp(max=1).nan_to_num(nan=1.0)
