"""Calls of which more is known than their sharding rows say: losses, scatters, views, copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from merakc.passes.batches.states import SAMPLES, Kind
from tests.passes.batches.forwards import CLASSES, WORDS, Batch, Loss, check, in_parts, make_batch


def count(z: Tensor) -> Tensor:
    return torch.arange(len(z))


def two(b: Batch) -> Tensor:
    """Two places of each sample."""
    return torch.stack([b["label"], (b["label"] + 1) % CLASSES], 1)


def twice(x: Tensor) -> Tensor:
    """Two rows of each sample."""
    return x[:, None].expand(-1, 2, -1).reshape(2 * len(x), -1)


def put(x: Tensor, places: Tensor, values: Tensor | float) -> Tensor:
    """The same with other values in these places of each sample."""
    x = x.clone()
    x[:, places] = values
    return x


def diagonal(z: Tensor, places: Tensor) -> Tensor:
    return (z.sum(1, keepdim=True) * torch.arange(1.0, 9.0))[places, places].square().sum()


SUMS: dict[str, Loss] = {
    "cross-entropy": lambda m, z, b: F.cross_entropy(z, b["label"]),
    "missing labels": lambda m, z, b: F.cross_entropy(z, b["missing"]),
    "class weights": lambda m, z, b: F.cross_entropy(z, b["missing"], weight=m.weights),
    "ignored class": lambda m, z, b: F.cross_entropy(z, b["label"], ignore_index=1),
    "smoothing and weights": lambda m, z, b: F.cross_entropy(
        z, b["missing"], weight=m.weights, label_smoothing=0.2),
    "probabilities": lambda m, z, b: F.cross_entropy(z, b["target"].softmax(1), weight=m.weights),
    "probabilities of the model": lambda m, z, b: F.cross_entropy(z, m.other(b["x"]).softmax(1)),
    "one at a time": lambda m, z, b: (
        F.cross_entropy(z, b["label"], reduction="none") * b["weight"]).sum(),
    "words": lambda m, z, b: F.cross_entropy(
        (z[:, None] * m.table.weight).flatten(0, 1),
        b["missing"][:, None].expand(-1, WORDS).flatten()),
    "words in dim 2": lambda m, z, b: F.cross_entropy(
        (z[:, None] * m.table.weight).transpose(1, 2), b["missing"][:, None].expand(-1, WORDS)),
    "negative likelihood": lambda m, z, b: F.nll_loss(
        z.log_softmax(1), b["missing"], weight=m.weights),
    "images": lambda m, z, b: F.nll_loss(
        z[:, :, None, None].expand(-1, -1, 2, 2).log_softmax(1),
        b["missing"][:, None, None].expand(-1, 2, 2)),
    "margins": lambda m, z, b: F.multi_margin_loss(z, b["label"], weight=m.weights),
    "margins of many": lambda m, z, b: F.multilabel_margin_loss(
        z, F.pad(b["label"][:, None], (0, CLASSES - 1), value=-1)),
    "scattered": lambda m, z, b: (
        m.table.weight[:3].index_add(0, b["label"], z) * m.vector).sum(),
    "scattered with a place each": lambda m, z, b: (
        m.vector.scatter_add(0, b["label"], z[:, 0]).sum()),
    "the like": lambda m, z, b: (z[torch.arange(len(z)), b["label"]] * b["weight"]).mean(),
    "two of each": lambda m, z, b: z[torch.arange(len(z))[:, None], two(b)].square().sum(),
    "two of each of two rows": lambda m, z, b: twice(z)[
        torch.arange(2 * len(z))[:, None], twice(two(b))].square().sum(),
    "put into two of each": lambda m, z, b: (
        z.square().index_put((torch.arange(len(z))[:, None], two(b)), m.other(b["x"])[:, :2])
        * b["target"]).sum(),
    "one number put into two of each": lambda m, z, b: (
        z.square().index_put((torch.arange(len(z))[:, None], two(b)), m.scale) * b["target"]).sum(),
    "a number put behind": lambda m, z, b: (
        put(z.square(), torch.arange(CLASSES) % 2 == 0, 0.0) * b["target"]).sum(),
    "a row put behind": lambda m, z, b: (
        put(z.square(), torch.tensor([0, 2]), m.vector[:2]) * b["target"]).sum(),
    "own values put behind": lambda m, z, b: (
        put(z.square(), torch.tensor([0, 2]), m.other(b["x"])[:, :2]) * b["target"]).sum(),
    "a diagonal": lambda m, z, b: (z.sum(1, keepdim=True) * torch.arange(1.0, 9.0))[
        count(z), count(z)].square().sum(),
    "views": lambda m, z, b: (torch.cat([z, m.other(b["x"])]).tanh()[len(z):] * b["target"]).sum(),
    "both views": lambda m, z, b: (
        torch.cat([z, m.other(b["x"])]).tanh() * torch.cat([b["target"], z])).sum(),
    "copies of a row": lambda m, z, b: (m.vector.expand(len(z), -1) * z.square()).sum(),
    "repeated": lambda m, z, b: (m.vector.repeat(len(z), 1) * z).sum(),
    "repeated views": lambda m, z, b: (z.repeat(2, 1) * torch.cat([b["target"], z])).sum(),
    "a row of each sample twice": lambda m, z, b: (
        z.repeat_interleave(2, 0) * b["target"].repeat_interleave(2, 0)).sum(),
    "words of a table": lambda m, z, b: (m.table(b["label"]) * z).sum(),
}  # fmt: skip
COUPLED: dict[str, Loss] = {
    "scattered, then squared": lambda m, z, b: (
        torch.zeros(CLASSES, CLASSES).double().index_add(0, b["label"], z).square().sum()),
    "counts by label": lambda m, z, b: (
        torch.zeros(CLASSES).long().scatter_add(0, b["label"], (z[:, 0] > 0).long()) * z.sum(0)
    ).sum(),
    "labels of others": lambda m, z, b: F.cross_entropy(z, b["label"].flip(0)).square(),
    "a part of the samples": lambda m, z, b: z[: len(z) // 2].sum(),
    "neighbours": lambda m, z, b: (z[1:] - z[:-1]).square().sum(),
    "every second": lambda m, z, b: z[::2].sum(),
    "the last": lambda m, z, b: z[-1].sum(),
    "the like of another": lambda m, z, b: z[torch.arange(len(z)).flip(0), b["label"]].mul(
        m.other(b["x"])[:, 0]).mean(),
    "one count for both": lambda m, z, b: diagonal(z, count(z)),
    "places of all for each": lambda m, z, b: (z.sum(1, keepdim=True) * torch.arange(1.0, 9.0))[
        count(z)[:, None], count(z)[None]].square().sum(),
    "another order put": lambda m, z, b: (
        z.square().index_put((count(z).flip(0), b["label"]), m.other(b["x"])[:, 0])
        * b["target"]).sum(),
    "values of others put": lambda m, z, b: (
        z.square().index_put((count(z), b["label"]), z[:, 0].flip(0)) * b["target"]).sum(),
    "values of others put behind": lambda m, z, b: (
        put(z.square(), torch.tensor([0, 2]), z[:, :2].flip(0)) * b["target"]).sum(),
    "copies of all for each": lambda m, z, b: (z[None].expand(len(z), -1, -1) * z[:, None]).sum(),
    "samples beside a parameter": lambda m, z, b: torch.cat([z, m.table.weight]).logsumexp(0).sum(),
    "samples as classes": lambda m, z, b: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    "gradients by frequency": lambda m, z, b: (
        F.embedding(b["label"], m.table.weight, scale_grad_by_freq=True) * z).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples(name: str) -> None:
    step = check(SUMS[name])
    assert step.loss.kind is Kind.SUM
    assert step.splits[0].head is None


@pytest.mark.parametrize("name", COUPLED)
def test_couplings(name: str) -> None:
    step = check(COUPLED[name])
    assert step.loss.kind is Kind.COUPLED
    assert "test_own_rules.py:" in step.loss.why


@pytest.mark.parametrize("sizes", [(2, 2), (2, 7), (5, 3, 2)])
def test_labels_may_all_be_missing_in_a_part(sizes: tuple[int, ...]) -> None:
    batch = make_batch(sum(sizes))
    batch["missing"][: sizes[0]] = -100
    check(lambda m, z, b: F.cross_entropy(z, b["missing"]), batch, sizes)


def test_views_stand_outside_of_the_samples_and_copies_inside() -> None:
    views = in_parts(lambda m, z, b: torch.cat([z, z, z]).sin().sum())
    assert views.state("cat").dims == ((3, SAMPLES), (CLASSES,))
    turns = in_parts(lambda m, z, b: z.repeat_interleave(2, 0).sin().sum())
    assert turns.state("sin").dims == ((SAMPLES, 2), (CLASSES,))


def test_the_places_of_a_part_are_its_own() -> None:
    step = check(SUMS["the like"])
    (counted,) = [n for n in step.graph.nodes if n.op == "aten.arange.default"]
    assert counted.args[0] == step.sizes[0]


def test_batch_norm_is_of_each_micro_batch_by_convention() -> None:
    """As in all of data parallelism; the plan names it."""
    step = in_parts(lambda m, z, b: (m.norm(z) * b["target"]).sum())
    assert step.loss.kind is Kind.SUM
    (told,) = step.splits[0].conventions
    assert told.startswith("batch norm is over each micro-batch by itself, at ")


def test_an_instance_norm_is_of_each_sample() -> None:
    step = check(lambda m, z, b: m.instance(z[:, :, None] * torch.arange(1.0, 5.0)).sin().sum())
    assert step.loss.kind is Kind.SUM
    assert not step.splits[0].conventions
