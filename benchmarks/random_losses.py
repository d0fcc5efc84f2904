"""`python -m benchmarks.random_losses`: random loss graphs, each equal to one process or refused.

A loss is a tree of operations on the features of a small model, its parameters and a batch: sums,
means, products, guards, counts, couplings of samples, reshapes, masks, functions of all of them.
Every value has a kind, which says its shape, so that every tree is a loss. It is run on one rank in
four micro-batches and compared with the plain model on the whole batch.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import hypothesis
import torch
import torch.nn.functional as F
import typer
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import merakc
from benchmarks.harness import finish
from benchmarks.loss_cells import Verdict
from benchmarks.loss_formulas.formula import (
    CLASSES,
    IGNORED,
    Formula,
    Named,
    Small,
    build,
    whole_batch,
)
from merakc.errors import MerakError
from merakc.machines.cluster import NOMINAL_CPU

MICRO_BATCHES = 4
DEPTH = 5
# Values are kept near 1, so that rounding is near 1e-16: what is zero in theory is far below this.
BOUND = 1e-9
LARGEST = 1e4
NUDGE = 1e-13  # of a weight: a thousand times its rounding, in case many roundings add up


class Kind(Enum):
    """What a value is, by shape."""

    ROWS = "[samples, classes]"
    EACH = "[samples]"
    PAIRS = "[samples, samples]"
    CLASS = "[classes]"
    LOSS = "[]"
    COUNT = "[], of integers or near them"
    SIZE = "a number of Python's, from shapes"


R, E, P, C, L, K, N = Kind


@dataclass(frozen=True, slots=True)
class Tree:
    """An operation on the values of its branches, or a leaf; a loss formula if its kind is LOSS."""

    op: str
    branches: tuple[Tree, ...] = ()

    def __call__(self, z: Tensor, b: Named, p: Named) -> Any:
        """The value, of features, batch and parameters."""
        if not self.branches:
            return LEAVES[self.op][1](z, b, p)
        return OPS[self.op][2](*(branch(z, b, p) for branch in self.branches))

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.branches))
        return f"{self.op}({inside})" if inside else self.op


def _same(b: Named) -> Tensor:
    return (b.c[:, None] == b.c[None]).double()


LEAVES: dict[str, tuple[Kind, Callable[[Tensor, Named, Named], Any]]] = {
    "z": (R, lambda z, b, p: z),
    "z@mix": (R, lambda z, b, p: z @ p.mix),
    "target": (R, lambda z, b, p: b.target),
    "bits": (R, lambda z, b, p: b.bits),
    "z0": (E, lambda z, b, p: z[:, 0]),
    "ce_each": (E, lambda z, b, p: F.cross_entropy(z, b.y, reduction="none")),
    "square_each": (E, lambda z, b, p: (z - b.target).pow(2).mean(1)),
    "mask": (E, lambda z, b, p: b.mask),
    "weight": (E, lambda z, b, p: b.weight),
    "labelled": (E, lambda z, b, p: (b.y != IGNORED).to(z.dtype)),
    "arange": (E, lambda z, b, p: torch.arange(len(z)).to(z.dtype)),
    "same_label": (P, lambda z, b, p: _same(b)),
    "eye": (P, lambda z, b, p: torch.eye(len(z), dtype=z.dtype)),
    "w": (C, lambda z, b, p: p.w),
    "class_counts": (C, lambda z, b, p: F.one_hot(b.c, CLASSES).sum(0).to(z.dtype)),
    "ce": (L, lambda z, b, p: F.cross_entropy(z, b.y)),
    "mse": (L, lambda z, b, p: F.mse_loss(z, b.target)),
    "tau": (L, lambda z, b, p: p.tau),
    "2": (L, lambda z, b, p: torch.tensor(2.0, dtype=z.dtype)),
    "mask_sum": (K, lambda z, b, p: b.mask.sum()),
    "label_count": (K, lambda z, b, p: (b.y != IGNORED).sum()),
    "positive_count": (K, lambda z, b, p: (z[:, 0] > 0).sum()),
    "weight_sum": (K, lambda z, b, p: b.weight.sum()),
    "n": (N, lambda z, b, p: len(z)),
    "numel": (N, lambda z, b, p: z.numel()),
    "width": (N, lambda z, b, p: z.shape[1]),
}

OPS: dict[str, tuple[Kind, tuple[Kind, ...], Callable[..., Any]]] = {
    # What stays rows, or makes each sample's row depend on others
    "tanh_r": (R, (R,), torch.tanh),
    "mul_r": (R, (R, R), lambda a, o: a.tanh() * o),
    "add_r": (R, (R, R), lambda a, o: a + o),
    "softmax_r": (R, (R,), lambda a: a.softmax(1)),
    "scale_rows": (R, (R, E), lambda a, e: a * e.tanh()[:, None]),
    "scale_classes": (R, (R, C), lambda a, c: a * c.tanh()),
    "mask_rows": (R, (R, E), lambda a, e: torch.where(e[:, None] > 0, a, 0.5)),
    "scale_all_r": (R, (R, L), lambda a, s: a * s.tanh()),
    "centre": (R, (R,), lambda a: a - a.mean(0)),
    "softmax_samples": (R, (R,), lambda a: a.softmax(0)),
    "roll": (R, (R,), lambda a: a.roll(1, 0)),
    "flip": (R, (R,), lambda a: a.flip(0)),
    "cumsum": (R, (R,), lambda a: a.cumsum(0).tanh()),
    "mix_pairs": (R, (P, R), lambda q, a: q.softmax(1) @ a),
    "flatten_back": (R, (R,), lambda a: a.flatten().sin().view(-1, CLASSES)),
    "reshape_mixes": (R, (R,), lambda a: a.reshape(CLASSES, -1).softmax(1).reshape(-1, CLASSES)),
    "two_views": (R, (R, R), lambda a, o: torch.cat([a, o]).tanh()[len(a) :]),
    "detach_r": (R, (R,), lambda a: a.detach()),
    # What is one number of each sample
    "sum_classes": (E, (R,), lambda a: a.sum(1)),
    "mean_classes": (E, (R,), lambda a: a.mean(1)),
    "logsumexp_classes": (E, (R,), lambda a: a.logsumexp(1)),
    "max_classes": (E, (R,), lambda a: a.amax(1)),
    "tanh_e": (E, (E,), torch.tanh),
    "mul_e": (E, (E, E), lambda a, o: a.tanh() * o),
    "add_e": (E, (E, E), lambda a, o: a + o),
    "over_sum": (E, (E,), lambda a: a.abs() / (a.abs().sum() + 1e-3)),
    "over_count_e": (E, (E, K), lambda a, k: a / k.clamp(min=1)),
    "less_mean": (E, (E,), lambda a: a - a.mean()),
    "above_median": (E, (E, E), lambda a, o: a * (o > o.median())),
    "softmax_e": (E, (E,), lambda a: a.softmax(0)),
    "sorted": (E, (E,), lambda a: a.sort().values),
    "by_rank_of": (E, (E, E), lambda a, o: a[o.argsort(stable=True)]),
    "first": (E, (R,), lambda a: a[:, 0]),
    "row_of_pairs": (E, (P,), lambda q: q.logsumexp(1)),
    "column_of_pairs": (E, (P,), lambda q: q.softmax(0).mean(1)),
    "diagonal": (E, (P,), lambda q: q.diagonal()),
    # Samples against samples
    "gram": (P, (R, R), lambda a, o: a.tanh() @ o.tanh().T),
    "differences": (P, (E, E), lambda a, o: (a[:, None] - o[None]).tanh()),
    "masked_pairs": (P, (P, P), lambda q, o: q * (o > 0.5)),
    # What has lost the samples
    "sum_samples": (C, (R,), lambda a: a.sum(0)),
    "mean_samples": (C, (R,), lambda a: a.mean(0)),
    "max_samples": (C, (R,), lambda a: a.amax(0)),
    "weighted_sum": (C, (E, R), lambda e, a: e @ a),
    "add_c": (C, (C, C), lambda a, o: a + o),
    "mul_c": (C, (C, C), lambda a, o: a.tanh() * o),
    "tanh_c": (C, (C,), torch.tanh),
    "pairwise_by_labels": (C, (R, R), lambda a, o: (a.T @ o / len(a)).tanh().sum(1)),
    # Losses
    "sum": (L, (E,), lambda a: a.sum()),
    "mean": (L, (E,), lambda a: a.mean()),
    "mean_rows": (L, (R,), lambda a: a.mean()),
    "sum_rows": (L, (R,), lambda a: a.sum()),
    "mean_classes_of": (L, (C,), lambda c: c.mean()),
    "dot": (L, (E, E), lambda a, o: torch.dot(a.tanh(), o)),
    "norm": (L, (E,), lambda a: (a.pow(2).sum() + 1e-3).sqrt()),
    "variance": (L, (E,), lambda a: a.var()),
    "largest": (L, (E,), lambda a: a.max()),
    "top_2": (L, (E,), lambda a: a.topk(2).values.mean()),
    "logsumexp": (L, (E,), lambda a: a.logsumexp(0)),
    "mean_pairs": (L, (P,), lambda q: q.mean()),
    "prefix": (L, (R,), lambda a: a[:3].tanh().sum()),
    "add": (L, (L, L), lambda a, o: a + o),
    "subtract": (L, (L, L), lambda a, o: a - o),
    "mul": (L, (L, L), lambda a, o: a.tanh() * o),
    "by_count": (L, (L, K), lambda a, k: a / k),
    "by_count_clamped": (L, (L, K), lambda a, k: a / k.clamp(min=1)),
    "by_count_eps": (L, (L, K), lambda a, k: a / (k + 1e-2)),
    "times_1_by": (L, (L, K), lambda a, k: a * (1 / k)),
    "by_size": (L, (L, N), lambda a, n: a / n),
    "by_root_of_size": (L, (L, N), lambda a, n: a * (1 / math.sqrt(n))),
    "by_loss": (L, (L, L), lambda a, o: a / (1 + o.abs())),
    "tanh": (L, (L,), torch.tanh),
    "root": (L, (L,), lambda a: (a.pow(2) + 0.1).sqrt()),
    "exp": (L, (L,), lambda a: a.tanh().exp()),
    "clamp": (L, (L,), lambda a: a.clamp(-1, 1)),
    "nan_to_num": (L, (L,), torch.nan_to_num),
    "where": (L, (L, L), lambda a, o: torch.where(a > o, a, 2 * o)),
    "where_counted": (L, (K, L, L), lambda k, a, o: torch.where(k > 3, a, o)),
    "stack_sum": (L, (L, L), lambda a, o: torch.stack([a, o]).sum()),
    "stack_mean": (L, (L, L), lambda a, o: torch.stack([a, 2 * o]).mean()),
    "detach": (L, (L,), lambda a: a.detach()),
    "relu": (L, (L,), torch.relu),
    # Counts
    "add_k": (K, (K, K), lambda a, o: a + o),
    "times_size": (K, (K, N), lambda k, n: k * n),
    "guard": (K, (K,), lambda k: k.clamp(min=2)),
    "where_k": (K, (K,), lambda k: torch.where(k > 1, k, torch.ones_like(k))),
    "count_above": (K, (E,), lambda e: (e > 0.1).sum()),
    "root_k": (K, (K,), lambda k: k.to(torch.float64).sqrt()),
    "sum_of_weights": (K, (E,), lambda e: e.abs().sum()),
}  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, kind: Kind = Kind.LOSS, depth: int = DEPTH) -> Tree:
    """Trees of a kind, no deeper than `depth`."""
    ops = [name for name, (of, _, _) in OPS.items() if of is kind]
    leaves = [name for name, (of, _) in LEAVES.items() if of is kind]
    deep = ops and depth > 0 and (depth == DEPTH or draw(st.integers(0, 3)) > 0)
    name = draw(st.sampled_from(ops if deep else leaves))
    return Tree(name, tuple(draw(trees(of, depth - 1)) for of in OPS[name][1]) if deep else ())


Step = tuple[Tensor, dict[str, Tensor]]


def plain_step(tree: Tree, nudge: float = 0.0) -> Step | None:
    """The loss and the gradients in one process, with weights nudged by that part of themselves.

    None where there is nothing to compare: no gradient, or numbers that are large or none at all.
    """
    formula = Formula("random", "random", tree)
    model = build(formula)
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + nudge * (-1) ** k)
    loss = model(**whole_batch(formula))["loss"]
    if not loss.requires_grad:
        return None
    loss.backward()
    step = loss.detach(), _gradients(model)
    sizes = [float(tensor.abs().max()) for tensor in (step[0], *step[1].values())]
    return step if all(size < LARGEST for size in sizes) else None


def _gradients(model: Small) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def difference(one: Step, other: Step) -> float:
    """The largest difference, relative to the largest value, or to 1 if that is smaller."""
    (loss, gradients), (wanted, plain) = one, other
    zero = torch.zeros((), dtype=torch.float64)
    pairs = [(loss, wanted)] + [
        (gradients.get(name, zero), plain.get(name, zero)) for name in gradients.keys() | plain
    ]
    largest = max(float(tensor.abs().max()) for tensor in (wanted, *plain.values()))
    found = max(float((a - o).abs().nan_to_num(torch.inf).max()) for a, o in pairs)
    return found / max(1.0, largest)


def judge(tree: Tree) -> tuple[Verdict, str] | None:
    """What becomes of a tree on one rank in micro-batches, and why; None where nothing can be
    compared, since the plain step is not finite, or another one within rounding (ties of values
    that are sorted, and what is zero but for rounding).
    """
    wanted, nudged = plain_step(tree), plain_step(tree, NUDGE)
    if wanted is None or nudged is None or difference(nudged, wanted) > BOUND / 10:
        return None
    formula = Formula("random", "random", tree)
    batch = whole_batch(formula)
    try:
        model = merakc.auto_parallel(
            build(formula), batch, micro_batches=MICRO_BATCHES, cluster=NOMINAL_CPU
        )
        loss = model(**batch)["loss"]
        loss.backward()
    except MerakError as error:
        return Verdict.REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:
        return Verdict.CRASH, f"{type(error).__name__}: {error}"
    loss = loss.detach()
    apart = difference((loss, model.full_gradients()), wanted)
    if apart > BOUND:
        losses = f"loss {float(loss):.6g} for {float(wanted[0]):.6g}"
        return Verdict.WRONG, f"{losses}, off by {apart:.1e}"
    return Verdict.EQUAL, ""


def main(
    examples: Annotated[int, typer.Option(help="How many trees.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the trees.")] = 0,
    show: Annotated[int, typer.Option(help="How many of each kind of failure to print.")] = 10,
) -> None:
    """Draws trees and judges each; exits with 1 where one is wrong or crashes."""
    start_s = time.perf_counter()
    torch.set_num_threads(1)
    found: dict[str, tuple[Verdict, str]] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(trees())
    def collect(tree: Tree) -> None:
        verdict = judge(tree)
        hypothesis.assume(verdict is not None)
        if verdict is not None:
            found[str(tree)] = verdict

    collect()
    console = Console()
    for kind in (Verdict.REFUSED, Verdict.CRASH, Verdict.WRONG):
        shortest = sorted((t for t, (v, _) in found.items() if v is kind), key=len)[:show]
        for text in shortest:
            line = f"{kind}: {text}: {found[text][1]}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    counts = Counter(verdict for verdict, _ in found.values())
    bad = counts[Verdict.WRONG] + counts[Verdict.CRASH]
    told = ", ".join(f"{counts[v]} {v}" for v in Verdict)
    wall_s = time.perf_counter() - start_s
    finish(
        console, not bad, f"{told} of {len(found)} different losses, seed {seed}, {wall_s:.0f} s"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    typer.run(main)
