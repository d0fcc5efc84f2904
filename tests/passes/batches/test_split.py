"""The step in parts: what the parts give, what the head gives, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.ir.batches import PER_MICRO_BATCH, Rows, ShareKind
from merakc.ir.graph import InputKind, OutputKind, Ref
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.split import split
from merakc.passes.batches.states import Kind
from tests.passes.batches.forwards import CLASSES, WIDTH, analysed, check, in_parts, make_batch


def test_a_sum_needs_no_head() -> None:
    (first, *_) = in_parts(lambda m, z, b: z.square().mean()).splits
    assert first.head is None
    assert first.known is None
    assert first.conventions == ()
    assert [o.kind for o in first.graph.outputs] == [OutputKind.LOSS]


def test_a_head_reads_the_waist_and_what_is_known_and_nothing_else() -> None:
    step = check(lambda m, z, b: (z @ z.T * b["mask"]).logsumexp(1).sum() * m.scale)
    for part in step.splits:
        assert part.head is not None
        shares = {s.name: s for s in part.head.waist}
        assert [o.kind for o in part.graph.outputs] == [OutputKind.WAIST] * len(shares)
        assert {o.name for o in part.graph.outputs} == set(shares)
        assert sorted(s.kind for s in shares.values()) == [ShareKind.CONSTANT, ShareKind.ROWS]
        (rows,) = [s for s in shares.values() if s.kind is ShareKind.ROWS]
        assert (rows.rows, rows.spec.shape) == (Rows(), (8, 3))
        kinds = {i.kind for i in part.head.graph.inputs}
        assert kinds == {InputKind.ACTIVATION, InputKind.KNOWN}
        assert "test_split.py:" in part.head.source
        assert part.head.why == "matmul: samples meet other samples"
        assert part.known is not None
        assert {i.target for i in part.known.part.inputs} == {"mask"}
        assert part.head == step.splits[0].head, "all ranks run the same"


def test_a_coupled_term_takes_the_loss_into_the_head() -> None:
    step = check(lambda m, z, b: z.square().mean() + z.std(0).sum())
    assert step.splits[0].head is not None
    assert step.loss.kind is Kind.COUPLED


class Several(nn.Module):
    """A loss, and results of every kind."""

    def __init__(self, power: int = 2) -> None:
        super().__init__()
        self.layer, self.power = nn.Linear(WIDTH, 3).double(), power

    def forward(self, x: Tensor, mask: Tensor, **_: Tensor) -> dict[str, Tensor]:
        z = self.layer(x)
        return {
            "loss": z.square().sum(), "rows": z * 2, "views": torch.cat([z, z], 1).t(),
            "sum": z.mean(), "count": mask.sum(), "weight": self.layer.bias * 2,
            "coupled": z.sum().pow(self.power), "known": mask.to(z.dtype).cumsum(0),
        }  # fmt: skip


def test_results_are_put_together_by_their_kinds() -> None:
    """A scalar is the sum or mean of the whole batch, which users would call for; it was once the
    mean over micro-batches.
    """
    step = in_parts(Several(), make_batch())
    (first, *_) = step.splits
    assert first.results == {
        "rows": (ShareKind.ROWS, Rows()),
        "views": (ShareKind.ROWS, Rows(1)),
        "sum": (ShareKind.SUM, None),
        "count": (ShareKind.CONSTANT, None),
        "weight": (ShareKind.CONSTANT, None),
        "known": (ShareKind.ROWS, Rows()),
    }
    assert first.head is not None
    outputs = {o.name: o.kind for o in first.head.graph.outputs}
    assert outputs == {"coupled": OutputKind.RESULT, "loss": OutputKind.LOSS}


class Tail(nn.Module):
    """A coupling before most of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.rest = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()

    def forward(self, x: Tensor, **_: Tensor) -> dict[str, Tensor]:
        z = self.first(x)
        return {"loss": self.rest(z - z.mean(0)).square().sum()}


def test_layers_behind_a_coupling_are_refused_with_its_line_and_the_remedy() -> None:
    text = (
        r"test_split.py:\d+: \w+: .*: samples of the batch are coupled before 75% of the layers' "
        r".*micro_batches=1.*couplings=\"per micro-batch\""
    )
    with pytest.raises(RecordError, match=text):
        in_parts(Tail(), make_batch())


def test_a_loss_for_each_sample_is_refused() -> None:
    found = in_parts(lambda m, z, b: z.square().sum(1).mean()).found[0]
    (rows,) = [n for n in found.part.nodes if n.op == "aten.sum.dim_IntList"]
    each = (replace(found.part.outputs[0], ref=Ref(rows.name)),)
    with pytest.raises(RecordError, match="one number for each sample; return their mean or sum"):
        split(found, each)


def test_per_micro_batch_each_part_is_a_batch_of_its_own() -> None:
    step = in_parts(lambda m, z, b: z.square().mean() + z.std(0).sum())
    for found, n in zip(step.found, step.sizes, strict=True):
        own = split(found, found.part.outputs, PER_MICRO_BATCH)
        assert own.head is None
        (told,) = own.conventions
        assert told.startswith("each micro-batch by itself, at ")
        assert "test_split.py" in told
        shares = [a for x in own.graph.nodes for a in x.args if isinstance(a, float) and a == n / 8]
        assert shares


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


class Edges(nn.Module):
    """Adds up the features of neighbours, which the batch says by places among all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> dict[str, Tensor]:
        """A mean square."""
        given = self.first(x)
        met = torch.zeros_like(given).index_add(0, edges[1], given[edges[0]])
        return {"loss": self.last(met).square().mean()}


def test_places_among_all_samples_have_no_meaning_in_a_micro_batch() -> None:
    edges = torch.tensor([[0, 7, 3], [1, 2, 6]])
    found = analysed(Edges().double(), {"x": make_batch(8)["x"], "edges": edges}, 2)
    with pytest.raises(RecordError, match=r"50% of the layers'.*micro_batches=1; samples are"):
        split(found, found.part.outputs, most=0.4)
    with pytest.raises(RecordError, match=r"test_split.py:\d+: couplings=.*as edges of a graph"):
        split(found, found.part.outputs, PER_MICRO_BATCH)


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
