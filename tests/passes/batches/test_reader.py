"""Values of the batch alone, and those that are made of nothing, as a part sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Ref
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.states import SAMPLES, Kind, State

Values = Callable[[Tensor, Tensor], Tensor]
S = (SAMPLES,)


class Model(nn.Module):
    def __init__(self, values: Values) -> None:
        super().__init__()
        self.layer, self.values = nn.Linear(4, 3), values

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x).sum(1) * 1.0).sum() + self.values(y, self.layer.weight).sum()


def last_of(values: Values, op: str) -> State:
    """The state of the last call of an op."""

    def recorded(n: int) -> Graph:
        batch = torch.zeros(n, 4), torch.zeros(n, dtype=torch.long)
        return record(Model(values), batch, {}).graph

    found: Analysis = analyse(recorded(2), recorded(8), {"0": Rows(), "1": Rows()}, 2, 8)
    node = [n for n in found.part.nodes if n.op.split(".")[1] == op][-1]
    return found.states[Ref(node.name)]


@pytest.mark.parametrize(
    ("values", "op", "wanted"),
    [
        (lambda y, w: y * 2, "mul", State(Kind.ROWS, (S,), True)),
        (lambda y, w: (y * 2).sum(), "sum", State(Kind.CONSTANT, (), True, True)),
        (lambda y, w: y.flip(0) * 1, "flip", State(Kind.ROWS, (S,), True, True)),
        (lambda y, w: (y > 0).sum().clamp(min=1), "clamp", State(Kind.CONSTANT, (), True, True)),
        (lambda y, w: torch.arange(len(y)) * 1, "arange", State(Kind.ROWS, (S,), True, True)),
        (lambda y, w: torch.zeros(len(y)) * 1, "zeros", State(Kind.ROWS, (S,), True)),
        (lambda y, w: torch.arange(5) * 1, "arange", State(Kind.CONSTANT, ((5,),), True)),
        (lambda y, w: torch.zeros(2 * len(y)) * 1, "zeros",
         State(Kind.ROWS, ((SAMPLES, 2),), True)),
        (lambda y, w: w.exp(), "exp", State(Kind.CONSTANT, ((3,), (4,)))),
    ],
)  # fmt: skip
def test_states(values: Values, op: str, wanted: State) -> None:
    if op == "sum":
        state = last_of(lambda y, w: (y * 2).sum().clamp(min=1), "clamp")
    else:
        state = last_of(values, op)
    assert state._replace(why="") == wanted


def test_a_table_of_samples_by_samples_is_whole() -> None:
    state = last_of(lambda y, w: (y[:, None] == y[None]).long(), "eq")
    assert (state.kind, state.known, state.whole) == (Kind.COUPLED, True, True)
    assert "table of samples by samples" in state.why


def test_what_follows_from_all_samples_is_known_of_all() -> None:
    state = last_of(lambda y, w: torch.maximum(y.flip(0), y + 1), "maximum")
    assert state == State(Kind.ROWS, (S,), True, True)
