"""The end of a forward: it begins at the layers' values, and is small."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, InputKind, OutputKind, Ref
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.proof.certificate import certify
from merakc.passes.batches.proof.tail import SHRUNK, shrunk, tail
from merakc.passes.batches.states import SAMPLES

WORDS, LENGTH = 1000, 6


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Embedding(WORDS, 4), nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.table(ids) @ self.table.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) * self.scale


def found() -> Analysis:
    def recorded(n: int) -> Graph:
        return record(Words(), (torch.zeros(n, LENGTH, dtype=torch.long),), {}).graph

    return analyse(recorded(2), recorded(8), {"0": Rows()}, 2, 8)


def end_of(whole: Analysis) -> Analysis:
    (loss,) = [o for o in whole.part.outputs if o.kind is OutputKind.LOSS]
    return tail(whole, loss)


def test_layers_become_inputs() -> None:
    end = end_of(found())
    (made,) = [i for i in end.part.inputs if i.kind is InputKind.ACTIVATION]
    assert made.spec.shape == (2, LENGTH, WORDS)
    assert end.states[Ref(made.name)].dims == ((SAMPLES,), (LENGTH,), (WORDS,))
    assert "aten.embedding.default" not in {n.op for n in end.part.nodes}
    targets = {i.target for i in end.part.inputs if i.kind is InputKind.PARAMETER}
    assert targets == {"scale"}


def test_what_no_argument_names_is_shrunk() -> None:
    end = shrunk(end_of(found()))
    for graph, samples in ((end.part, 2), (end.whole, 8)):
        (made,) = [i for i in graph.inputs if i.kind is InputKind.ACTIVATION]
        assert made.spec.shape == (samples, LENGTH, SHRUNK)  # a slice names the length
    (name,) = [i.name for i in end.part.inputs if i.kind is InputKind.ACTIVATION]
    assert end.states[Ref(name)].dims == ((SAMPLES,), (LENGTH,), (SHRUNK,))


class FirstOfBatch(nn.Module):
    """What the whole batch alone says is made otherwise for a part, which reads no `bits`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, bits: Tensor) -> Tensor:
        seen = torch.cat([x, bits]).tanh()[len(x) :]
        return self.layer(x).mean() * seen[:3].reshape(-1, 2).sum()


def test_what_no_part_reads_stays_for_the_whole_batch() -> None:
    def recorded(n: int) -> Graph:
        return record(FirstOfBatch(), (torch.ones(n, 4), torch.ones(n, 4)), {}).graph

    whole = analyse(recorded(2), recorded(8), {"0": Rows(), "1": Rows()}, 2, 8)
    (loss,) = [o for o in whole.part.outputs if o.kind is OutputKind.LOSS]
    end = shrunk(tail(whole, loss))
    part, other = ({i.target: i.spec.shape for i in g.inputs} for g in (end.part, end.whole))
    assert part.keys() == other.keys()
    assert part["1"] == (2, 4)  # a reshape of the whole batch names the width
    assert other["1"] == (8, 4)
    assert certify(whole, loss) == ""
