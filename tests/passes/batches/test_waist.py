"""The smallest values between the layers and what couples samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from merakc.ir.batches import ShareKind
from merakc.ir.graph import Ref
from merakc.passes.batches.waist import find_waist, is_work, of_parameters
from tests.passes.batches.forwards import CLASSES, Loss, check, in_parts, loss_of


def waist_of(loss: Loss) -> tuple[list[str], set[str]]:
    """The ops that make the waist (inputs by name), and those of the head."""
    found = in_parts(loss).found[0]
    waist = find_waist(found, [loss_of(found.part).ref])
    ops = {n.name: n.op.split(".")[1] for n in found.part.nodes}
    return sorted(ops.get(r.node, r.node) for r in waist.values), {ops[n] for n in waist.head}


@pytest.mark.parametrize(
    ("loss", "values", "head"),
    [
        (lambda m, z, b: z.sum().square(), ["sum"], {"pow"}),
        # rather the sums than the rows, and the rows before they were copied
        (lambda m, z, b: z.sum(0).square().sum() + z.square().sum(), ["sum", "sum"],
         {"pow", "sum", "add"}),
        (lambda m, z, b: z.repeat(1, 9).roll(1, 0).square().sum(), ["linear"],
         {"repeat", "roll", "pow", "sum"}),
        # parameters are handed over too, and what is of the batch alone is known to both
        (lambda m, z, b: (z @ z.T * m.scale * b["mask"]).sum(), ["linear", "scale"],
         {"permute", "transpose", "t", "matmul", "mul", "sum", "numpy_T"}),
    ],
)  # fmt: skip
def test_the_smallest_cut(loss: Loss, values: list[str], head: set[str]) -> None:
    found, behind = waist_of(loss)
    assert found == values
    assert behind <= head
    assert "linear" not in behind


def test_layers_are_products_with_matrices_of_parameters_and_draws() -> None:
    step = in_parts(
        lambda m, z, b: (
            (torch.nn.functional.dropout(z) * m.vector + m.table(b["label"])) @ m.layer.weight
        ).sum()
    )
    found = step.found[0]
    made = of_parameters(found)
    assert Ref("layer.weight") in made
    work = {n.op for n in found.part.nodes if is_work(found, n, made)}
    assert work == {
        "aten.linear.default", "merakc.dropout.default", "aten.embedding.default",
        "aten.matmul.default",
    }  # fmt: skip


def test_what_is_made_of_parameters_is_no_layer() -> None:
    found = in_parts(lambda m, z, b: (z * (m.vector.exp() @ m.vector.diag())).sum()).found[0]
    made = of_parameters(found)
    outer = [n for n in found.part.nodes if all(r in made for r in n.refs)]
    assert outer
    assert not any(is_work(found, n, made) for n in outer)


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
