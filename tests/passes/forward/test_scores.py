"""Losses without all scores at once: the values of whole scores, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import merakc
from benchmarks.memory import peak_live_bytes
from benchmarks.ranks import run_ranks
from merakc.costs.work.flops import graph_flops, node_flops
from merakc.costs.work.kernels import graph_work, node_kernels
from merakc.frontend.record import record
from merakc.kernels import gemm
from merakc.kernels import scores as kernel
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.forward import scores
from merakc.passes.forward.scores import BLOCKWISE, without_scores
from merakc.passes.pipeline import differentiate
from tests.battery.small_models import (
    Tensors,
    Words,
    assert_close,
    build,
    gradients,
    parallel,
    part,
    warm_up,
    words,
)

MIB = 2**20
LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "recompute": "full"},
    {"tp": 2, "overlap": 2, "sequence_parallel": True},
    {"dp": 2, "compile": True, "micro_batches": 2},
]


class Head(nn.Module):
    """A loss of scores; `kind` says what stands between them."""

    def __init__(self, kind: str, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(4, 16, bias=bias)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """The loss; where scores are scaled, weighed or given back, they are read whole."""
        made = x if self.kind == "received" else self.head(x)
        if self.kind == "scaled":
            made = made / 2
        smoothing = 0.1 if self.kind == "smoothed" else 0.0
        weight = torch.arange(16.0) if self.kind == "weighed" else None
        flat = made.float().view(-1, 16) if self.kind == "cast" else made.flatten(0, 1)
        loss = F.cross_entropy(flat, labels.view(-1), weight, label_smoothing=smoothing)
        return (loss, made) if self.kind == "read" else loss


@pytest.mark.parametrize(
    "kind", ["", "cast", "biased", "scaled", "smoothed", "weighed", "read", "received"]
)
def test_scores_go_where_the_loss_alone_reads_them(kind: str) -> None:
    x, labels = torch.randn(2, 3, 16 if kind == "received" else 4), torch.randint(0, 16, (2, 3))
    graph = record(Head(kind, kind == "biased"), (x, labels), {}).graph
    less = without_scores(graph, 0)
    less.verify()
    assert any(n.op == BLOCKWISE for n in less.nodes) == (kind in ("", "cast", "biased"))
    assert without_scores(graph) is graph  # they are small


def test_costs_are_those_of_whole_scores_and_one_product() -> None:
    graph = record(Head(""), (torch.randn(2, 3, 4), torch.randint(0, 16, (2, 3))), {}).graph
    whole, less = (differentiate(g) for g in (graph, without_scores(graph, 0)))
    assert whole.backward is not None
    assert less.backward is not None
    product = 2 * 6 * 4 * 16
    assert graph_flops(less.forward) == graph_flops(whole.forward) == product
    assert graph_flops(less.backward) == graph_flops(whole.backward) + product
    for one, flops in ((graph, product), (without_scores(graph, 0), 2 * product)):
        work = graph_work(one)  # of x there is no gradient
        assert sum(k.flops * n for k, n in work.forward.items()) == product
        assert sum(k.flops * n for k, n in work.backward.items()) == flops
    nodes = (*less.forward.nodes, *less.backward.nodes)
    specs = less.forward.specs() | less.backward.specs()
    for node in nodes:
        made = sum(k.flops for k in node_kernels(node, specs))
        assert made == node_flops(node, specs), node


def losses_in_blocks() -> list[tuple[float, Tensors]]:
    scores.LEAST_BYTES, kernel.ROWS = 0, 5
    kernel.BLOCK_BYTES = 5 * 3 * 8  # three classes of five rows
    found = []
    for options in LAYOUTS:
        model = parallel(Words, words(0), **options)
        loss = model(**part(words(0), model))["loss"]
        loss.backward()
        found.append((loss.item(), model.full_gradients()))
    return found


def test_every_layout_trains_as_one_process() -> None:
    warm_up()
    plain = build(Words)
    loss = plain(**words(0))["loss"]
    loss.backward()
    found, other = run_ranks(2, losses_in_blocks)
    assert [own for own, _ in other] == [own for own, _ in found]
    for own_loss, own_gradients in found:  # the first rank has all of them
        assert own_loss == pytest.approx(loss.item(), rel=1e-12)
        assert_close(own_gradients, gradients(plain))


class Language(nn.Module):
    """Many words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4096, 32), nn.Linear(32, 4096, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """A loss."""
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def peaks() -> tuple[int, int]:
    """Predicted and measured live bytes of a step."""
    batch = {"ids": torch.arange(1024).view(2, 512)}
    run = merakc.auto_parallel(
        Language().train(), batch, micro_batches=1, recompute="none", cluster=NOMINAL_CPU
    )
    optimizer = torch.optim.AdamW(run.parameters())

    def step() -> None:
        optimizer.zero_grad()
        run(**batch).backward()

    step()
    optimizer.step()
    assert run.plan_file.prediction is not None
    return run.plan_file.prediction.peak_bytes[0], peak_live_bytes(run, optimizer, step)


@pytest.mark.parametrize("onednn", [False, True])
def test_memory_is_as_predicted(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    monkeypatch.setattr(gemm, "is_faster", lambda: onednn)
    whole, _ = peaks()
    monkeypatch.setattr(scores, "LEAST_BYTES", 0)
    monkeypatch.setattr(kernel, "BLOCK_BYTES", 1 << 20)
    predicted, measured = peaks()
    assert measured == pytest.approx(predicted, rel=0.02)
    assert predicted < whole - 28 * MIB  # of scores, twice, 16 MiB
