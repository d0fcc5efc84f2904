"""Sums over samples stay sums under linear maps, and constants beside them count once."""

from __future__ import annotations

import pytest
import torch

from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import Loss, check, in_parts

# Of a sum over samples, `s` [classes]; what follows is linear in it.
LINEAR: dict[str, Loss] = {
    "sum": lambda m, z, b: z.sum(0).sum(),
    "mean": lambda m, z, b: z.sum(0).mean(),
    "mean over samples": lambda m, z, b: z.mean(0).sum(),
    "sums of means": lambda m, z, b: z.sum(1).mean() + z.mean(1).sum() / 7,
    "over a number": lambda m, z, b: -(z.sum(0) / 7).sum(),
    "times a parameter": lambda m, z, b: (z.sum(0) * m.vector).sum(),
    "times a function of parameters": lambda m, z, b: (z.sum(0) * m.vector.exp() / m.scale).sum(),
    "dot": lambda m, z, b: z.sum(0) @ m.vector,
    "matrices": lambda m, z, b: (
        (m.table.weight @ z.sum(0)).sum() + (z.sum(0) @ m.layer.weight).sum()),
    "views": lambda m, z, b: z.sum(0).unsqueeze(0).expand(4, -1).reshape(-1).flip(0)[:5].sum(),
    "plus a parameter": lambda m, z, b: (z.sum(0) + m.vector).sum(),
    "plus a number": lambda m, z, b: (z.sum(0) + 3).sum() + 2.0,
    "from a number": lambda m, z, b: 3 - z.sum() + torch.rsub(z.sum(), m.scale, alpha=0.5),
    "minus twice": lambda m, z, b: torch.sub(z.sum(), m.vector.sum(), alpha=2),
    "plus an integer of a parameter": lambda m, z, b: (
        (z.sum(0) + m.table.weight.argmax(0)).sum() * m.scale),
    "plus a mask of a parameter": lambda m, z, b: (z.sum(0) + (m.vector > 0)).sum() * m.scale,
    "stacked": lambda m, z, b: torch.stack([z.sum(), m.scale, z.square().mean()]).sum(),
    "joined with a parameter": lambda m, z, b: torch.cat([z.sum(0), m.vector]).mean(),
    "joined with integers": lambda m, z, b: (
        torch.cat([z.sum(0), m.table.weight.argmax(0)]).sum() * m.scale),
    "chosen": lambda m, z, b: torch.where(m.vector > 0, z.sum(0), m.scale).sum(),
    "chosen or a number": lambda m, z, b: (
        torch.where(m.vector > 0, z.sum(0), 2.0) * m.scale).sum(),
    "put into a parameter": lambda m, z, b: (
        m.vector.index_put((torch.tensor([0, 2]),), z.sum(0)[:2]).sum()),
    "filled with nothing": lambda m, z, b: z.sum(0).masked_fill(m.vector > 0, 0.0).sum(),
    "a penalty": lambda m, z, b: z.sum() + sum(p.square().sum() for p in m.parameters()),
    "a complex constant": lambda m, z, b: (
        torch.view_as_real((z.sum() + 1j) * (2 - 1j))[1] * m.scale),
    "known": lambda m, z, b: z.sum() * b["weight"].sum() + b["weight"].sum(),
}  # fmt: skip
COUPLED: dict[str, Loss] = {
    "square": lambda m, z, b: z.sum(0).square().sum(),
    "times another": lambda m, z, b: z.sum() * m.other(b["x"]).sum(),
    "times itself": lambda m, z, b: (lambda s: (s * s).sum())(z.sum(0)),
    "over another": lambda m, z, b: z.sum() / m.other(b["x"]).square().sum(),
    "divider": lambda m, z, b: (m.vector / z.square().sum(0)).sum(),
    "against rows": lambda m, z, b: (z - z.mean(0)).square().sum(),
    "condition": lambda m, z, b: torch.where(z.sum(0) > 0, m.vector, m.scale).sum(),
    "filled with a number": lambda m, z, b: (
        z.sum(0).masked_fill(m.vector > 0, 1.0) * m.scale).sum(),
    "whole numbers": lambda m, z, b: z.sum(0).to(torch.int64).sum() * m.scale,
    "whole numbers by a sum": lambda m, z, b: z.sum(0).detach().sum(dtype=torch.int64) * m.scale,
    "counts and one": lambda m, z, b: ((z > 0).sum(0) + 1).double().sum() * m.scale,
    "rounded quotient": lambda m, z, b: (
        z.sum(0).div(m.scale.detach(), rounding_mode="floor") * m.vector).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_what_stays_a_sum(name: str) -> None:
    step = check(LINEAR[name])
    assert name == "a complex constant" or step.loss.kind is Kind.SUM
    assert name == "a complex constant" or step.splits[0].head is None


@pytest.mark.parametrize("name", COUPLED)
def test_what_is_no_longer_one(name: str) -> None:
    step = check(COUPLED[name])
    assert step.loss.kind is Kind.COUPLED
    assert step.splits[0].head is not None


def test_a_constant_counts_by_the_share_of_each_part() -> None:
    step = in_parts(lambda m, z, b: z.sum() + m.scale)
    for part, n in zip(step.splits, step.sizes, strict=True):
        (share,) = [x for x in part.graph.nodes if ".once." in x.name]
        assert share.args[1] == pytest.approx(n / 8)
