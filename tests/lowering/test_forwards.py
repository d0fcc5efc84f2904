"""Parts of a batch that are derived from the recording of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from merakc.frontend import record as recording
from merakc.frontend.python.compared import Compared
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Graph
from merakc.lowering import forwards as module
from merakc.lowering.recording import record_part
from merakc.passes.batches.recorded import BatchRecording

CPU = torch.device("cpu")


class Masked(nn.Module):
    """Attention with dropout, a mask of its length and one of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.dropout = nn.Linear(6, 12), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Of `[n, s, 6]` and `[n, s]`."""
        n, s, _ = x.shape
        a, b = self.into(x).view(n * s, 12).view(n, s, 12).split(6, dim=2)
        mask = torch.ones(s, s, dtype=torch.bool).tril() & keep[:, None]
        scores = (a @ b.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
        return self.dropout(scores @ b).square().mean()


class Uneven(Masked):
    """With a row more than it has samples."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        more = torch.cat([x, x[:1]])[: len(x)]
        return super().forward(more, keep)


class Asking(Masked):
    """Whose long batches take another path."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 6:
            x = x * 2
        return super().forward(x, keep)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples of the forwards that are run from here on."""
    found: list[int] = []
    run = recording._run

    def counted(*args: Any) -> Any:
        found.append(len(args[4]["x"]))
        return run(*args)

    monkeypatch.setattr(recording, "_run", counted)
    return found


def part(
    model: nn.Module, compared: Compared, samples: int, length: int, sizes: tuple[int, ...] = ()
) -> BatchRecording:
    """The first of two parts of a batch, or of the batch of a rank."""
    batch = {"x": torch.zeros(samples, length, 6), "keep": torch.ones(samples, length) > 0}
    layout = BatchLayout(sizes or (samples,), 2)
    return record_part(model, (), batch, layout, CPU, compared=compared)


@pytest.mark.parametrize("sizes", [(), (8, 12)])
def test_a_part_is_derived_as_it_would_be_recorded(
    sizes: tuple[int, ...], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKED", False)
    model, compared = Masked(), Compared()
    part(model, compared, 4, 5)
    forwards.clear()
    for length in (3, 9, 2):
        found = part(model, compared, 8, length, sizes)
        assert set(forwards) == {sum(sizes) or 8}
        wanted = part(model, Compared(), 8, length, sizes)
        assert found.graph == wanted.graph
        assert found.found is not None
        assert wanted.found is not None
        assert found.found.states == wanted.found.states
        forwards.clear()


@pytest.mark.parametrize("kind", [Uneven, Asking])
def test_what_does_not_grow_with_the_samples_is_recorded(
    kind: type[Masked], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKED", False)
    model, compared = kind(), Compared()
    for length in (4, 5):
        part(model, compared, 8, length)
    forwards.clear()
    part(model, compared, 8, 9)
    assert 4 in forwards


def test_a_part_that_would_be_recorded_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compared = Masked(), Compared()
    part(model, compared, 4, 5)
    derive = Compared.part_of

    def wrong(self: Compared, whole: Graph, samples: int, total: int) -> Graph | None:
        made = derive(self, whole, samples, total)
        nodes = made.nodes[:-1] if made is not None else ()
        return made and Graph(made.inputs, nodes, made.outputs, made.constants)

    monkeypatch.setattr(Compared, "part_of", wrong)
    with pytest.raises(AssertionError, match="not what was derived"):
        part(model, compared, 8, 5)
