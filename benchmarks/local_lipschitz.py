"""The local Lipschitz constant of one attention layer of GPT-2's shape: CPU time to a relative accuracy of 1e-3.

Power iteration on JᵀJ by automatic differentiation is told the true value and stops as soon as it is within 1e-3 of it,
which no user can do; such a row flatters the method. Holdfast stops by its own residual, and so does svds. Every method
that starts from one random vector and stops by itself can settle on a smaller singular value when the start happens to
be almost orthogonal to the top vector; the tables count how many draws were within 1e-3, and a ratio is taken only over
draws on which both methods were. All methods run in float32 on one thread, and the time of each includes everything
that it sets up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import svds
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import holdfast
from benchmarks.harness import cpu_seconds, machine, save
from holdfast.attention import AttentionJacobian
from holdfast.errors import HoldfastError

WIDTH, HEADS = 768, 12
TOKENS = (32, 128, 512)
DRAWS = 7
ACCURACY = 1e-3
STEADY = 1e-4
SVDS_TOL = 0.03


@dataclass(frozen=True)
class Setting:
    """Standard deviations of the random weights."""

    name: str
    query_key: float
    value: float = 0.02
    output: float = 0.02 / 24**0.5
    bias: float = 0.02


SETTINGS = (
    Setting("GPT-2 at initialisation", query_key=0.02),
    Setting("peaked", query_key=0.05),
)


@dataclass(frozen=True)
class Problem:
    """One draw of the weights and of an input with rows of mean 0 and variance 1, as a layer norm leaves them."""

    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    b_out: Tensor
    x: Tensor
    start: Tensor

    @classmethod
    def draw(cls, setting: Setting, tokens: int, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(1000 * tokens + seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        w_qk, w_v = normal(2 * WIDTH, WIDTH) * setting.query_key, normal(WIDTH, WIDTH) * setting.value
        return cls(
            w_in=torch.cat([w_qk, w_v]),
            b_in=normal(3 * WIDTH) * setting.bias,
            w_out=normal(WIDTH, WIDTH) * setting.output,
            b_out=normal(WIDTH) * setting.bias,
            x=functional.layer_norm(normal(tokens, WIDTH), (WIDTH,)),
            start=normal(tokens, WIDTH),
        )

    @cached_property
    def layer(self) -> holdfast.AttentionLayer:
        w_q, w_k, w_v = (w.mT.reshape(WIDTH, HEADS, -1).movedim(1, 0) for w in self.w_in.chunk(3))
        b_q, b_k, b_v = (b.reshape(HEADS, -1) for b in self.b_in.chunk(3))
        w_o = self.w_out.mT.reshape(HEADS, -1, WIDTH)
        return holdfast.AttentionLayer(w_q, w_k, w_v, w_o, b_q, b_k, b_v, self.b_out, causal=True)

    def function(self, x: Tensor) -> Tensor:
        """The layer in plain torch."""
        parts = functional.linear(x, self.w_in, self.b_in).chunk(3, -1)
        q, k, v = (t.reshape(len(x), HEADS, -1).transpose(0, 1) for t in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(y.transpose(0, 1).flatten(-2), self.w_out, self.b_out)

    @cached_property
    def reference(self) -> float:
        return holdfast.local_lipschitz(self.layer.double(), self.x.double(), tolerance=1e-8).value.item()

    @property
    def facts(self) -> dict[str, float]:
        """How large the query map is, and over how many keys a head spreads its attention."""
        p = self.layer.attention(self.x)
        keys = torch.special.entr(p).sum(-1).exp().mean()
        return {"norm_w_q": torch.linalg.matrix_norm(self.w_in[:WIDTH], 2).item(), "effective_keys": keys.item()}


@dataclass(frozen=True)
class Outcome:
    """A norm, and the number of products with J that it took; as many with Jᵀ, give or take one."""

    value: float
    steps: int


# -- products by automatic differentiation; forward differentiation has no rule for the fused attention kernels

Product = Callable[[Tensor], Tensor]


def autograd_products(problem: Problem) -> tuple[Product, Product]:
    """J v by `jvp`, Jᵀ u by one `vjp` closure that is kept."""
    pull = torch.func.vjp(problem.function, problem.x)[1]
    return lambda v: torch.func.jvp(problem.function, (problem.x,), (v,))[1], lambda u: pull(u)[0]


def double_reverse_products(problem: Problem) -> tuple[Product, Product]:
    """J v as the transpose of the `vjp`, which is linear: no pass over x is repeated."""
    y, pull, *_ = torch.func.vjp(problem.function, problem.x)
    push = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(y))[1]
    return lambda v: push(v)[0], lambda u: pull(u)[0]


def closed_form_products(problem: Problem) -> tuple[Product, Product]:
    jacobian = AttentionJacobian(problem.layer, problem.x)
    return jacobian.mv, jacobian.rmv


# -- the methods


def ours(problem: Problem) -> Outcome:
    result = holdfast.local_lipschitz(problem.layer, problem.x, tolerance=ACCURACY)
    return Outcome(result.value.item(), result.iterations)


def ours_by_default(problem: Problem) -> Outcome:
    result = holdfast.local_lipschitz(problem.layer, problem.x)
    return Outcome(result.value.item(), result.iterations)


def power(products: tuple[Product, Product], start: Tensor, stop: Callable[[float, float], bool]) -> Outcome:
    """Power iteration on JᵀJ until `stop`, which sees the value and the one before."""
    push, pull = products
    u, steps = push(start / start.norm()), 1
    value, before = u.norm().item(), 0.0
    while not stop(value, before):
        v = pull(u)
        u, steps = push(v / v.norm()), steps + 1
        value, before = u.norm().item(), value
    return Outcome(value, steps)


def power_oracle(problem: Problem) -> Outcome:
    return power(autograd_products(problem), problem.start, _within(problem.reference))


def power_steady(problem: Problem) -> Outcome:
    return power(autograd_products(problem), problem.start, lambda value, before: value - before <= STEADY * value)


def power_double_reverse(problem: Problem) -> Outcome:
    return power(double_reverse_products(problem), problem.start, _within(problem.reference))


def svds_autograd(problem: Problem) -> Outcome:
    return _svds(autograd_products(problem), problem.start)


def svds_closed_form(problem: Problem) -> Outcome:
    return _svds(closed_form_products(problem), problem.start)


def _within(reference: float) -> Callable[[float, float], bool]:
    return lambda value, _: abs(value / reference - 1) <= ACCURACY


def _svds(products: tuple[Product, Product], start: Tensor) -> Outcome:
    steps = 0

    def matvec(v: np.ndarray) -> np.ndarray:
        nonlocal steps
        steps += 1
        return products[0](torch.from_numpy(v).reshape(start.shape)).reshape(-1).numpy()

    def rmatvec(u: np.ndarray) -> np.ndarray:
        return products[1](torch.from_numpy(u).reshape(start.shape)).reshape(-1).numpy()

    operator = ScipyOperator((start.numel(), start.numel()), matvec, rmatvec, dtype=np.float32)
    (value,) = svds(operator, k=1, tol=SVDS_TOL, v0=start.reshape(-1).numpy(), return_singular_vectors=False)
    return Outcome(float(value), steps)


OURS = "holdfast, tolerance 1e-3"
METHODS: dict[str, Callable[[Problem], Outcome]] = {
    OURS: ours,
    "holdfast, tolerance 1e-6 (the default)": ours_by_default,
    "power, jvp and vjp, told when to stop": power_oracle,
    "power, jvp and vjp, until steady": power_steady,
    "power, vjp twice, told when to stop": power_double_reverse,
    "svds, jvp and vjp": svds_autograd,
    "svds, our products": svds_closed_form,
}
EXACT = (ours_by_default, power_oracle, power_double_reverse)  # these must be within ACCURACY on every draw


# -- the run


def run(*, quick: bool = False) -> None:
    """Measures, prints a table for every setting and, unless `quick`, writes the results."""
    tokens, draws = (TOKENS[:1], 2) if quick else (TOKENS, DRAWS)
    cases = [(setting, n, seed) for setting in SETTINGS for n in tokens for seed in range(draws)]
    console = Console()
    with sdpa_kernel(SDPBackend.MATH):
        for method in METHODS.values():
            method(Problem.draw(SETTINGS[-1], 8, 0))  # the first call of anything loads code
        rows = [_measure(*case) for case in track(cases, "local_lipschitz", console=console)]
    summary = [_summary(setting.name, n, rows) for setting in SETTINGS for n in tokens]
    for setting in SETTINGS:
        console.print(_table(setting.name, summary))
    if not quick:
        options = {"width": WIDTH, "heads": HEADS, "accuracy": ACCURACY, "steady": STEADY, "svds_tol": SVDS_TOL}
        weights = [asdict(setting) for setting in SETTINGS]
        content = {"machine": machine(), "options": options, "weights": weights, "summary": summary, "draws": rows}
        console.print(f"written to {save('local_lipschitz', content)}")


def _measure(setting: Setting, tokens: int, seed: int) -> dict[str, Any]:
    """Every method on one draw."""
    problem = Problem.draw(setting, tokens, seed)
    row: dict[str, Any] = {"setting": setting.name, "tokens": tokens, "seed": seed, "reference": problem.reference}
    row |= problem.facts | {"methods": {}}
    for name, method in METHODS.items():
        outcome, seconds = cpu_seconds(partial(method, problem))
        error = outcome.value / problem.reference - 1
        if method in EXACT and abs(error) > ACCURACY:
            raise HoldfastError(f"{name}: off by {error:.1e} for {setting.name}, n = {tokens}, seed {seed}")
        row["methods"][name] = asdict(outcome) | {"error": error, "cpu_seconds": seconds}
    return row


def _summary(setting: str, tokens: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the draws: (median, least, largest), and on how many the value was within ACCURACY."""
    draws = [row["methods"] for row in rows if row["setting"] == setting and row["tokens"] == tokens]
    methods = {}
    for name in METHODS:
        numbers: dict[str, list[float]] = {key: [d[name][key] for d in draws] for key in ("steps", "cpu_seconds")}
        both = [d for d in draws if max(abs(d[name]["error"]), abs(d[OURS]["error"])) <= ACCURACY]
        numbers["ratio"] = [d[name]["cpu_seconds"] / d[OURS]["cpu_seconds"] for d in both]
        errors = [abs(d[name]["error"]) for d in draws]
        methods[name] = {key: [statistics.median(v), min(v), max(v)] for key, v in numbers.items() if v} | {
            "within": sum(error <= ACCURACY for error in errors),
            "largest_error": max(errors),
        }
    return {"setting": setting, "tokens": tokens, "draws": len(draws), "methods": methods}


def _table(setting: str, summary: list[dict[str, Any]]) -> Table:
    title = f"{setting}: medians (ranges), float32, {torch.get_num_threads()} thread"
    table = Table(title=title, title_justify="left")
    table.add_column("n", justify="right")
    table.add_column("method")
    for name in ("steps", "CPU seconds", "times ours", "within 1e-3", "largest error"):
        table.add_column(name, justify="right")
    for part in (part for part in summary if part["setting"] == setting):
        for name, m in part["methods"].items():
            table.add_row(
                str(part["tokens"]) if name == OURS else "",
                name,
                "{:.0f} ({:.0f}–{:.0f})".format(*m["steps"]),
                "{:.3g} ({:.3g}–{:.3g})".format(*m["cpu_seconds"]),
                "" if name == OURS or "ratio" not in m else "{:.1f} ({:.1f}–{:.1f})".format(*m["ratio"]),
                f"{m['within']}/{part['draws']}",
                f"{m['largest_error']:.0e}",
            )
        table.add_section()
    return table
