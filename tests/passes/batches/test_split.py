"""The step in parts: what it takes from the whole batch, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.ir.batches import PER_MICRO_BATCH, Rows, ShareKind
from merakc.ir.graph import InputKind, OutputKind
from merakc.passes.batches.replay import replay
from merakc.passes.batches.split import split
from tests.passes.batches.forwards import CLASSES, WIDTH, analysed, check, in_parts, make_batch


def test_counts_are_known_before_the_step() -> None:
    step = check(lambda m, z, b: F.cross_entropy(z, b["missing"]))
    known = step.splits[0].known
    assert known is not None
    assert [share.kind for share in known.whole.waist] == [ShareKind.SUM]
    assert list(known.rows.values()) == [None]
    brought = {i.target for i in step.graph.inputs if i.kind is InputKind.BATCH}
    assert set(known.rows) <= brought


def test_a_sum_of_samples_needs_nothing_of_the_batch() -> None:
    step = check(lambda m, z, b: (z * b["target"]).sum())
    assert step.splits[0].known is None
    assert step.splits[0].head is None


class Deep(nn.Module):
    """Couples its samples before all of its layers but one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A mean square."""
        return {"loss": self.layers(self.first(x).softmax(0)).square().mean()}


def test_layers_behind_a_coupling_are_refused_and_can_be_asked_for() -> None:
    model, batch = Deep().double(), {"x": make_batch(8)["x"]}
    found = analysed(model, batch, 2)
    with pytest.raises(RecordError, match=r"softmax.*80% of the layers'.*per micro-batch"):
        split(found, found.part.outputs)
    step = split(found, found.part.outputs, PER_MICRO_BATCH)
    assert step.head is None
    (line,) = step.conventions
    assert "each micro-batch by itself" in line
    state = dict(model.named_parameters())
    loss = replay([step] * 4, [2] * 4, state, batch, {"x": Rows()})
    parts = [model(x)["loss"] / 4 for x in batch["x"].chunk(4)]
    torch.testing.assert_close(loss, torch.stack(parts).sum(), rtol=1e-12, atol=0)


class Written(nn.Module):
    """Writes a buffer from its samples, by a function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, CLASSES), function
        self.register_buffer("kept", torch.zeros(CLASSES))
        self.kept: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A loss that reads the buffer."""
        z = self.layer(x)
        loss = (z - self.kept).square().mean()
        with torch.no_grad():
            self.kept.copy_(self.function(self.kept, z))  # type: ignore[operator]
        return {"loss": loss}


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda kept, z: kept + 1, ShareKind.CONSTANT),
        (lambda kept, z: 0.9 * kept + 0.1 * z.mean(0), ShareKind.SUM),
    ],
)
def test_buffers_are_written_once(function: object, kind: ShareKind) -> None:
    step = in_parts(Written(function).double(), {"x": make_batch(8)["x"]})
    assert dict(step.splits[0].written) == {"kept": kind}


def test_a_buffer_of_coupled_samples_is_refused() -> None:
    with pytest.raises(RecordError, match="buffer 'kept' is written from samples"):
        in_parts(Written(lambda kept, z: z.var(0)).double(), {"x": make_batch(8)["x"]})


def test_results_say_how_they_come_together() -> None:
    class Results(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            z = self.layer(x)
            return {"loss": z.sum(), "rows": z, "total": z.sum(0), "bias": self.layer.bias * 2}

    found = analysed(Results().double(), {"x": make_batch(8)["x"]}, 2)
    results = split(found, found.part.outputs).results
    assert {name: kind for name, (kind, _) in results.items()} == {
        "rows": ShareKind.ROWS, "total": ShareKind.SUM, "bias": ShareKind.CONSTANT,
    }  # fmt: skip
    assert results["rows"][1] == Rows()
    assert any(o.kind is OutputKind.LOSS for o in found.part.outputs)
