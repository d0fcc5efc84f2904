"""What couples samples runs once for all micro-batches and dp ranks, as in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import merakc
from benchmarks.ranks import run_ranks
from merakc.ir.batches import BatchLayout, Head, Rows, Share, ShareKind
from merakc.ir.graph import Graph, TensorSpec
from merakc.ir.program import ActionKind, Mesh, StageGraphs
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.fused import Fuser
from merakc.runtime.head import HeadRunner
from tests.coupled_models import ROUTED, TOWERS, WIDE, Tensors
from tests.coupled_steps import CPU, joined, prepared, reference, trained

CASES = {"towers": TOWERS, "routed": ROUTED, "wide": WIDE}
STEPS = [
    ("towers", Mesh(), (8,), {}),
    ("towers", Mesh(pp=2), (8,), {}),
    ("towers", Mesh(dp=2), (8, 4), {}),
    ("towers", Mesh(dp=2, pp=2), (4, 8), {}),
    ("towers", Mesh(tp=2), (8,), {}),
    ("towers", Mesh(tp=2, pp=2), (8,), {"sequence_parallel": True}),
    ("wide", Mesh(tp=2), (8,), {}),
    ("wide", Mesh(tp=2, dp=2), (4, 8), {"sequence_parallel": True}),
    ("routed", Mesh(pp=2), (8,), {}),
    ("routed", Mesh(dp=2, pp=2), (4, 12), {"recompute": "full"}),
    ("routed", Mesh(tp=2), (8,), {}),
    ("routed", Mesh(pp=2), (8,), {"schedule": "zb-h1"}),
    ("routed", Mesh(pp=2), (8,), {"schedule": "zb-v", "recompute": "stage"}),
    ("towers", Mesh(pp=2), (8,), {"schedule": "interleaved-1f1b"}),
]


@pytest.mark.parametrize(("name", "mesh", "sizes", "options"), STEPS, ids=str)
def test_a_step_is_that_of_one_process(
    name: str, mesh: Mesh, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    case = CASES[name]
    found = run_ranks(mesh.world_size, trained, case, mesh, sizes, 2, options)
    loss, gradients = reference(case, sum(sizes))
    losses = [f["loss"] for f in found if f["loss"] is not None]
    assert len(losses) == 1
    torch.testing.assert_close(losses[0], loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(joined(found, mesh.tp), gradients, rtol=1e-10, atol=1e-10)
    heads = [sum(label.endswith("head") for label in f["labels"]) for f in found]
    assert sum(heads) == mesh.dp * mesh.tp
    for f in found:  # all forwards come first
        kinds = "".join(label[1] for label in f["labels"] if label[:1].isdigit())
        assert "F" not in kinds.lstrip("F")


def test_what_is_returned_of_the_whole_batch_is_there_without_a_backward() -> None:
    ready = prepared(replace(TOWERS, results=True), Mesh(), (8,), 4, {}, train=False)
    assert {a.kind for a in ready.executor.program.actions} == {ActionKind.FORWARD, ActionKind.HEAD}
    found = ready.executor.run(ready.inputs, ready.known)
    model = TOWERS.model()
    with torch.no_grad():
        wanted = model(**TOWERS.batch(8))
    assert found.loss is not None
    torch.testing.assert_close(found.loss, wanted["loss"], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.whole, {"logits": wanted["logits"]}, rtol=1e-10, atol=1e-10)
    assert found.gradients == {}


def scaled() -> tuple[Tensors, Tensors]:
    """Gradients of a loss as it is, and of 8 times that."""
    ready = prepared(TOWERS, Mesh(dp=2), (8, 4), 2, {})
    plain = ready.executor.run(ready.inputs, ready.known)
    ready.executor.loss_scale = 8.0
    more = ready.executor.run(ready.inputs, ready.known)
    assert (plain.loss is None) is (more.loss is None) is (ready.place[0] == 1)
    return plain.gradients, more.gradients


def test_gradients_are_those_of_the_scaled_loss() -> None:
    for plain, more in run_ranks(2, scaled):
        wanted = {name: 8 * gradient for name, gradient in plain.items()}
        torch.testing.assert_close(more, wanted, rtol=1e-12, atol=1e-12)


def test_graphs_of_kernels() -> None:
    ready = prepared(TOWERS, Mesh(), (8,), 2, {}, fuser=Fuser(torch.device("cpu")))
    found = ready.executor.run(ready.inputs, ready.known)
    _, gradients = reference(TOWERS, 8)
    torch.testing.assert_close(found.gradients, gradients, rtol=1e-10, atol=1e-10)


def test_a_message_has_values_of_all_dtypes_in_their_places() -> None:
    shares = [
        Share("flag", ShareKind.ROWS, TensorSpec((3,), torch.bool), Rows()),
        Share("wide", ShareKind.ROWS, TensorSpec((2, 3), torch.complex128), Rows(1)),
        Share("half", ShareKind.SUM, TensorSpec((5,), torch.float16)),
        Share("number", ShareKind.SUM, TensorSpec((), torch.int64)),
    ]
    head = Head(Graph((), (), ()), tuple(shares))
    layout = BatchLayout((2, 1), 1)
    runner = HeadRunner(head, StageGraphs(head.graph, None), layout, CPU, group=object())  # type: ignore[arg-type]
    for rank in (0, 1):
        sizes = [runner._shape(s, rank) for s in shares]
        starts, end = runner._spans(shares, rank)
        assert starts[0] == 0
        assert all(start % 16 == 0 for start in (*starts, end))
        message = torch.zeros(end, dtype=torch.uint8)
        values = [torch.full(size, 1 + k).to(s.spec.dtype)
                  for k, (s, size) in enumerate(zip(shares, sizes, strict=True))]  # fmt: skip
        for place, value in zip(runner._places(shares, message, rank), values, strict=True):
            place.copy_(value)
        for place, value in zip(runner._places(shares, message, rank), values, strict=True):
            assert torch.equal(place, value)


class NextWords(nn.Module):
    """Of a text of one word there is none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """A loss."""
        scores = self.out(self.words(ids))[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(scores, ids[:, 1:].flatten())}


def of_one_word() -> bool:
    ids = torch.arange(52).view(4, 13) % 32
    model = merakc.auto_parallel(NextWords(), {"ids": ids}, dp=2, cluster=NOMINAL_CPU).eval()
    with torch.no_grad():
        return bool(model(ids=ids[:2, :1])["loss"].isnan())


def test_the_loss_of_no_words_is_that_of_one_process() -> None:
    assert run_ranks(2, of_one_word) == [True, True]
