"""The gradient of a cross-entropy that is made at once, against autograd's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from merakc.analysis.liveness import live_bytes
from merakc.frontend.record import record
from merakc.ir.graph import Graph, InputKind
from merakc.ir.program import StageGraphs
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.autodiff.loss_gradient import NLL, SOFTMAX, without_zeros
from merakc.passes.pipeline import differentiate

ROWS, CLASSES = 6, 40
IGNORED = -100
LABELS = torch.tensor([0, 4, IGNORED, 2, 2, IGNORED])


class Loss(torch.nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=generator)
        self.logits = torch.nn.Parameter(numbers)
        self.options = options

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        found = cross_entropy(self.logits * 3, labels, **self.options)  # type: ignore[arg-type]
        return (found * torch.arange(1.0, ROWS + 1)).sum() if found.dim() else found * 2


def chunk(model: Loss) -> StageGraphs:
    return differentiate(record(model, (LABELS,), {}).graph)


def gradient(made: StageGraphs, model: Loss, labels: torch.Tensor) -> torch.Tensor:
    brought = {
        InputKind.PARAMETER: model.logits.detach(),
        InputKind.BATCH: labels,
        InputKind.TANGENT: torch.ones((), dtype=torch.float64),
    }
    forward, backward = made.forward, made.backward
    assert backward is not None
    outs = interpret(forward, {i.name: brought[i.kind] for i in forward.inputs})
    saved = {o.name: v for o, v in zip(forward.outputs, outs, strict=True)}
    given = {
        i.name: saved[i.key] if i.kind is InputKind.SAVED else brought[i.kind]
        for i in backward.inputs
    }
    (found,) = interpret(backward, given)
    assert isinstance(found, torch.Tensor)
    return found


def ops(graph: Graph | None) -> set[str]:
    assert graph is not None
    return {n.op for n in graph.nodes}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [IGNORED, 2])
def test_it_is_autograds(reduction: str, ignored: int) -> None:
    labels = LABELS if ignored == IGNORED else LABELS.clamp(min=0)
    model = Loss(reduction=reduction, ignore_index=ignored)
    plain = chunk(model)
    direct = without_zeros(plain)
    assert {NLL, SOFTMAX} <= ops(plain.backward)
    assert not {NLL, SOFTMAX} & ops(direct.backward)
    model(labels).backward()
    assert model.logits.grad is not None
    torch.testing.assert_close(gradient(plain, model, labels), model.logits.grad)
    found = gradient(direct, model, labels)
    torch.testing.assert_close(found, model.logits.grad, rtol=1e-14, atol=1e-15)
    assert (found != 0).any()


def test_nothing_comes_of_labels_that_are_all_ignored() -> None:
    model = Loss()
    found = gradient(without_zeros(chunk(model)), model, torch.full_like(LABELS, IGNORED))
    assert torch.equal(found, torch.zeros_like(found))


def test_classes_that_weigh_more_are_left_to_autograd() -> None:
    weighed = chunk(Loss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64)))
    assert without_zeros(weighed).backward == weighed.backward


def test_what_has_no_backward_stays() -> None:
    frozen = replace(chunk(Loss()), backward=None)
    assert without_zeros(frozen) is frozen


def test_it_takes_a_matrix_less() -> None:
    plain = chunk(Loss())
    direct = without_zeros(plain)
    assert plain.backward is not None
    assert direct.backward is not None
    more, less = (live_bytes(g).peak_bytes for g in (plain.backward, direct.backward))
    assert more - less == pytest.approx(ROWS * CLASSES * 8, rel=0.2)  # less a few numbers a row
