"""The second opinion with numbers: it agrees with the algebra, and sees where a rule is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Node, OutputKind
from merakc.passes.batches import normalise, reader
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.proof import certificate
from merakc.passes.batches.proof.certificate import certify
from merakc.passes.batches.states import Kind, Outcome, State, sums

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def found_of(loss: Loss, samples: int = 2, total: int = 8) -> Analysis:
    def recorded(n: int) -> Graph:
        batch = torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)
        return record(Model(loss), batch, {}).graph

    return analyse(recorded(samples), recorded(total), {"0": Rows(), "1": Rows()}, samples, total)


def certified(found: Analysis) -> str:
    (loss,) = [o for o in found.part.outputs if o.kind is OutputKind.LOSS]
    return certify(found, loss)


RIGHT: dict[str, Loss] = {
    "labels": lambda z, y: F.cross_entropy(z, y),
    "guard": lambda z, y: (z.sum(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "coupled": lambda z, y: (z @ z.T).logsumexp(1).mean(),
    "size": lambda z, y: z.square().sum() / len(z),
    "positive": lambda z, y: (
        z.abs().log().mean() + F.binary_cross_entropy(z.sigmoid(), z.sigmoid())
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_agrees(name: str) -> None:
    assert certified(found_of(RIGHT[name])) == ""


def rows_all_the_same(node: Node, *_: object) -> Outcome:
    """A wrong rule: whatever a call does, it keeps the samples of its first argument."""
    return Outcome((State(Kind.ROWS, (("S",), *((n,) for n in node.spec.shape[1:]))),))


SABOTAGED: dict[str, tuple[Loss, str, Callable[..., Outcome]]] = {
    "softmax over samples": (
        lambda z, y: (z.softmax(0) * z).sum(), "softmax", rows_all_the_same),
    "cumulated": (lambda z, y: (z.cumsum(0) * z).sum(), "cumsum", rows_all_the_same),
    "maximum as a sum": (lambda z, y: z.amax(0).sum(), "amax", lambda node, *_: sums(node)),
    "mean as a sum": (
        lambda z, y: F.mse_loss(z, z.sin()), "mse_loss", lambda node, *_: sums(node)),
    "sum as a mean": (
        lambda z, y: z.sum(0).sum(), "sum", lambda node, *_: sums(node, scaled=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGED)
def test_it_sees_a_wrong_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, op, wrong = SABOTAGED[name]
    right = reader.by_row

    def by_row(graph: object, node: Node, states: object, samples: int) -> Outcome:
        if node.op.split(".")[1] == op:
            return wrong(node)
        return right(graph, node, states, samples)  # type: ignore[arg-type]

    assert certified(found_of(loss)) == ""
    monkeypatch.setattr(reader, "by_row", by_row)
    with pytest.raises(RecordError, match=r"computed with numbers, the loss of 4 parts"):
        certified(found_of(loss))


def test_gradients_that_are_not_finite_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What zero times infinity is hangs on the order of calls, which parts have another of."""
    whole, parts = ([torch.ones(()), torch.tensor([x])] for x in (torch.nan, 1.0))
    given = itertools.cycle([whole, parts, whole])  # and with other rounding
    monkeypatch.setattr(certificate, "_loss_and_gradients", lambda *_: next(given))
    assert "no finite gradients" in certified(found_of(RIGHT["size"]))


def test_it_says_why_it_cannot() -> None:
    def never_finite(z: Tensor, y: Tensor) -> Tensor:
        return (z.abs() * -1.0).log().sum()

    assert "no finite loss" in certified(found_of(never_finite))


def test_uneven_parts_are_compared() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return z.square().sum() + 3.0  # of which each part has its share

    found, rest = found_of(loss, 5), found_of(loss, 3)
    (root,) = [o for o in found.part.outputs if o.kind is OutputKind.LOSS]
    assert certify(found, root, rest) == ""
    assert certify(found, root) == "the whole batch is no multiple of its parts"
    with pytest.raises(RecordError, match="parts of 5, 3 samples"):
        certify(found, root, replace(rest, total=7))


def test_what_is_by_convention_is_left_out() -> None:
    norm = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    assert certified(found_of(lambda z, y: (norm(z) - y[:, None]).square().mean())) == ""


def test_labels_that_are_ignored_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording is compared as it was, not as the algebra has written it."""
    monkeypatch.setattr(
        normalise._Writer, "mean_over_labels", lambda self, node: self.nodes.append(node)
    )
    with pytest.raises(RecordError, match="computed with numbers"):
        certified(found_of(lambda z, y: F.cross_entropy(z, y)))
