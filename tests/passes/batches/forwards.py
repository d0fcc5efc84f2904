"""Small forwards, what the algebra says of their values, and their steps in uneven parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.batches import BatchSplit, Rows
from merakc.ir.graph import Graph, Output, OutputKind, Ref
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.proof.replay import replay
from merakc.passes.batches.split import split
from merakc.passes.batches.states import State

SIZES = (3, 2, 3)
CLASSES, WIDTH, WORDS = 3, 4, 5
BOUND = 1e-10
Batch = dict[str, Tensor]
Loss = Callable[["Small", Tensor, Batch], Tensor]


class Small(nn.Module):
    """Features of each sample by two layers, and a loss of them.

    `m.other(x)` gives features of its own; there are parameters of other shapes, and a buffer.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.table = nn.Embedding(WORDS, CLASSES)
        self.vector = nn.Parameter(torch.tensor([0.5, -0.2, 0.3]))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.norm = nn.BatchNorm1d(CLASSES, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(CLASSES, affine=True)
        self.register_buffer("weights", torch.tensor([0.5, 2.0, 1.0]))
        self.weights: Tensor
        self.loss = loss
        self.double()

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """The loss of the features."""
        return {"loss": self.loss(self, self.layer(batch["x"]), batch)}


def make_batch(samples: int = sum(SIZES)) -> Batch:
    """Inputs, labels of which some are missing, a mask, targets, and weights."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    labels = torch.randint(0, CLASSES, (samples,), generator=draw)
    return {
        "x": normal(samples, WIDTH),
        "target": normal(samples, CLASSES),
        "label": labels,
        "missing": labels.masked_fill(torch.arange(samples) < samples // 2, -100),
        "mask": torch.rand(samples, generator=draw).double() > 0.4,
        "weight": torch.rand(samples, generator=draw).double(),
    }


@dataclass(frozen=True)
class Step:
    """A forward in parts of `sizes`: one analysis and one split for each part."""

    model: nn.Module
    batch: Batch
    sizes: tuple[int, ...]
    found: tuple[Analysis, ...]
    splits: tuple[BatchSplit, ...]

    def state(self, op: str, turn: int = -1) -> State:
        """The state of a node by its op's name; by default of the last of that op."""
        nodes = [n for n in self.found[0].part.nodes if n.op.split(".")[1] == op]
        return self.found[0].states[Ref(nodes[turn].name)]

    @property
    def loss(self) -> State:
        """The state of the loss."""
        return self.found[0].states[loss_of(self.found[0].part).ref]

    @property
    def graph(self) -> Graph:
        """The graph of the first part."""
        return self.splits[0].graph


def loss_of(graph: Graph) -> Output:
    return next(o for o in graph.outputs if o.kind is OutputKind.LOSS)


def recorded(model: nn.Module, batch: Batch, samples: int) -> Graph:
    """The forward of the first of the samples."""
    total = len(next(iter(batch.values())))
    part = {n: v[:samples] if v.dim() and len(v) == total else v for n, v in batch.items()}
    return record(model, (), part).graph


def analysed(model: nn.Module, batch: Batch, samples: int, *, placing: bool = False) -> Analysis:
    """What parts of so many samples make of the forward of a batch."""
    total = len(next(iter(batch.values())))
    rows = {n: Rows() for n, v in batch.items() if v.dim() and len(v) == total}
    whole = recorded(model, batch, total)
    part = recorded(model, batch, samples)
    return analyse(part, whole, rows, samples, total, placing=placing)


def in_parts(
    forward: Loss | nn.Module,
    batch: Batch | None = None,
    sizes: Sequence[int] = SIZES,
    *,
    placing: bool = False,
) -> Step:
    """A forward in parts of these sizes, which is not yet run."""
    model = forward if isinstance(forward, nn.Module) else Small(forward)
    batch = batch or make_batch(sum(sizes))
    found = {n: analysed(model, batch, n, placing=placing) for n in sizes}
    splits = {n: split(own, own.part.outputs) for n, own in found.items()}
    return Step(
        model, batch, tuple(sizes), tuple(found[n] for n in sizes),
        tuple(splits[n] for n in sizes),
    )  # fmt: skip


def check(
    forward: Loss | nn.Module,
    batch: Batch | None = None,
    sizes: Sequence[int] = SIZES,
    *,
    placing: bool = False,
) -> Step:
    """The step in parts, once its loss and all gradients equal those of the plain model."""
    step = in_parts(forward, batch, sizes, placing=placing)
    model, batch = step.model, step.batch
    parameters = dict(model.named_parameters())
    loss = model(**batch)["loss"]
    wanted = gradients(loss, parameters)
    state = {**parameters, **dict(model.named_buffers())}
    found = replay(step.splits, step.sizes, state, batch, step.found[0].sampled)
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(gradients(found, parameters), wanted, rtol=BOUND, atol=BOUND)
    return step


def gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss; zeros where there is none."""
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(parameters.items(), found, strict=True)
    }
