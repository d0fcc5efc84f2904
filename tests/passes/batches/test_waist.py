"""Where parts end: at the smallest values between the layers and what couples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from merakc.ir.batches import ShareKind
from merakc.ir.graph import Ref
from merakc.passes.batches.waist import find_waist
from tests.passes.batches.forwards import CLASSES, Loss, check, in_parts, loss_of

ROWS, SUM, CONSTANT = ShareKind.ROWS, ShareKind.SUM, ShareKind.CONSTANT
# What the parts hand over: kinds, and numbers of a sample or of all.
WAISTS: dict[str, tuple[Loss, dict[ShareKind, list[int]]]] = {
    "features": (lambda m, z, b: (z @ z.T).logsumexp(1).mean(), {ROWS: [CLASSES]}),
    "one number of each": (lambda m, z, b: z.sum(1).softmax(0).square().sum(), {ROWS: [1]}),
    "a sum": (lambda m, z, b: z.square().mean().sqrt(), {SUM: [1]}),
    "a sum, and a scale": (
        lambda m, z, b: z.square().sum().sqrt() * m.scale.exp(), {SUM: [1], CONSTANT: [1]}),
    "a loss beside": (
        lambda m, z, b: F.cross_entropy(z, b["label"]) + z.mean(0).square().sum(),
        {SUM: [1, CLASSES]}),
    "a wide function of few": (
        lambda m, z, b: (z.sum(1)[:, None] * torch.ones(50).double()).softmax(0).square().sum(),
        {ROWS: [1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", WAISTS)
def test_waists(name: str) -> None:
    forward, wanted = WAISTS[name]
    step = check(forward)
    head = step.splits[0].head
    assert head is not None
    found: dict[ShareKind, list[int]] = {}
    for share in head.waist:
        samples = sum(step.sizes) if share.kind is ROWS else 1
        found.setdefault(share.kind, []).append(share.spec.numel // samples)
    assert {kind: sorted(each) for kind, each in found.items()} == wanted


def test_layers_stay_with_the_parts() -> None:
    step = in_parts(lambda m, z, b: (z @ z.T).logsumexp(1).mean())
    found = step.found[0]
    waist = find_waist(found, [loss_of(found.part).ref])
    assert waist.values == (Ref("linear"),)
    assert "linear" not in waist.head


def test_layers_behind_the_coupling_are_of_the_head() -> None:
    step = check(lambda m, z, b: m.other(b["x"] * z.softmax(0).sum(1, keepdim=True)).square().sum())
    head = step.splits[0].head
    assert head is not None
    assert "aten.linear.default" in {n.op for n in head.graph.nodes}
