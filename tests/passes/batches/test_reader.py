"""What is of the batch alone, what is drawn, and which numbers and sizes are those of samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.batches import Rows
from merakc.ir.graph import Graph, Ref
from merakc.passes.batches.analyse import Analysis, analyse
from merakc.passes.batches.states import SAMPLES, Kind, State
from tests.passes.batches.forwards import CLASSES, Loss, check, in_parts, make_batch

# Sums over samples of rows that are weighed by what is of the batch alone.
KNOWN: dict[str, Loss] = {
    "a count": lambda m, z, b: z.sum() / b["mask"].sum(),
    "a guarded count": lambda m, z, b: (
        (z * b["mask"][:, None]).sum() / b["mask"].sum().clamp(min=5).sqrt()),
    "weights that add up to one": lambda m, z, b: (
        z * (b["weight"] / b["weight"].sum())[:, None]).sum(),
    "a cumulated weight": lambda m, z, b: (z * b["weight"].cumsum(0)[:, None]).sum(),
    "ranks": lambda m, z, b: (z * b["weight"].argsort().argsort()[:, None]).sum(),
    "classes by frequency": lambda m, z, b: (
        z / F.one_hot(b["label"], CLASSES).sum(0).clamp(min=1)).sum(),
    "the commonest label": lambda m, z, b: (z * b["label"].mode()[0]).sum(),
    "a choice": lambda m, z, b: torch.where(b["mask"].sum() > 3, z.sum(), m.other(b["x"]).mean()),
    "a buffer": lambda m, z, b: (z * m.weights).sum() / (m.weights * b["weight"].sum()).sum(),
    "places": lambda m, z, b: (z * torch.arange(len(z))[:, None]).sum(),
    "a ramp": lambda m, z, b: (z * torch.linspace(0, 1, len(z))[:, None]).sum(),
    "a table by place": lambda m, z, b: (m.table(torch.arange(len(z)) % 5) * z).sum(),
    "numbers in a list": lambda m, z, b: (
        z.sum(1) * torch.tensor([1 / (k + 1) for k in range(len(z))], dtype=torch.float64)).sum(),
    "the number of samples in a tensor": lambda m, z, b: z.sum() / torch.tensor(float(len(z))),
    "their number, guarded": lambda m, z, b: z.sum() / torch.tensor(len(z)).clamp(min=4),
    "all of one value": lambda m, z, b: z.sum() / torch.full((), float(len(z))),
    "ones": lambda m, z, b: (z * torch.ones(len(z), 1)).sum() / torch.ones(len(z)).sum(),
    "noise of rows": lambda m, z, b: (z * b["mask"][:, None]).sum() + 0 * torch.rand(len(z)).sum(),
}  # fmt: skip
NUMBERS: dict[str, Loss] = {
    "over their number": lambda m, z, b: z.sum() / len(z),
    "times one over it": lambda m, z, b: z.sum() * (1 / len(z)),
    "over its root": lambda m, z, b: z.square().sum() / len(z) ** 0.5,
    "over all elements": lambda m, z, b: z.square().sum() / z.numel(),
    "a power": lambda m, z, b: z.sum() * len(z) ** -1.5,
    "each sample": lambda m, z, b: z.clamp(max=1 / len(z)).sum() + z.abs().pow(1 / len(z)).sum(),
    "a constant": lambda m, z, b: z.sum() + m.scale * len(z),
    "of a mean": lambda m, z, b: z.square().mean() * z.shape[0] + z.mean() / 3,
}  # fmt: skip
COUPLED: dict[str, Loss] = {
    "a factor of a sum": lambda m, z, b: torch.add(z.sum(), m.vector.sum(), alpha=len(z)),
    "a place": lambda m, z, b: z[len(z) - 1].sum(),
    "a place in a tensor": lambda m, z, b: z[torch.tensor([len(z) - 1])].sum(),
    "a turn": lambda m, z, b: (z.roll(len(z) // 2, 0) * b["target"]).sum(),
    "the largest half": lambda m, z, b: z.sum(1).topk(len(z) // 2).values.sum(),
    "a table of all by all": lambda m, z, b: (
        (torch.ones(len(z), len(z)).tril().double() @ z).square().sum()
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_of_the_batch_alone_is_a_constant(name: str) -> None:
    step = check(KNOWN[name])
    assert step.loss.kind is Kind.SUM
    assert step.splits[0].head is None


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_samples_are_those_of_the_whole_batch(name: str) -> None:
    step = check(NUMBERS[name])
    assert step.loss.kind is Kind.SUM
    assert step.splits[0].known is None


@pytest.mark.parametrize("name", COUPLED)
def test_numbers_that_are_sizes_or_places_couple(name: str) -> None:
    assert check(COUPLED[name]).loss.kind is Kind.COUPLED


def test_what_only_all_samples_give_is_known_before_the_step() -> None:
    step = in_parts(KNOWN["a cumulated weight"])
    state = step.state("cumsum")
    assert state.known
    assert state.whole
    assert state.dims == ((SAMPLES,),)
    known = step.splits[0].known
    assert known is not None
    assert next(n.op for n in known.whole.graph.nodes) == "aten.cumsum.default"
    assert all(n.op != "aten.cumsum.default" for n in step.graph.nodes)
    assert not in_parts(NUMBERS["a power"]).state("sum").known, "a parameter stands before it"


class Written(nn.Module):
    """A buffer that the forward reads and writes is not known before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES).double()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.steps: Tensor

    def forward(self, x: Tensor, weight: Tensor, **_: Tensor) -> dict[str, Tensor]:
        self.steps.add_(1)
        return {"loss": self.layer(x).sum() * self.steps / weight.sum()}


def test_a_buffer_that_is_written_is_none_of_the_batch_alone() -> None:
    step = in_parts(Written(), make_batch())
    assert not step.state("add").known
    assert step.state("add").kind is Kind.CONSTANT


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_a_function_of_the_users_is_taken_to_keep_samples_apart_and_named() -> None:
    step = check(lambda m, z, b: Double.apply(z).square().sum())
    assert step.loss.kind is Kind.SUM
    (told,) = step.splits[0].conventions
    assert "to compute each sample by itself, at " in told
    turned = in_parts(lambda m, z, b: Double.apply(z.t()).square().sum())
    assert turned.loss.kind is Kind.COUPLED


@pytest.mark.parametrize(
    ("draw", "dims"),
    [
        (lambda z: torch.rand(len(z), 1), ((SAMPLES,), (1,))),
        (lambda z: torch.rand(CLASSES), ((CLASSES,),)),
        (lambda z: torch.rand(len(z) * 2).view(-1, 2)[:, :1], ((SAMPLES, 2),)),
    ],
)
def test_draws_are_of_each_sample_or_of_all(draw: object, dims: object) -> None:
    step = in_parts(lambda m, z, b: (z * draw(z)).sum())  # type: ignore[operator]
    (made,) = [n for n in step.found[0].part.nodes if n.op == "merakc.uniform.default"]
    assert step.state("uniform").dims == dims, made
    assert step.loss.kind is Kind.SUM


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


def test_what_sees_memory_is_refused() -> None:
    with pytest.raises(RecordError, match=r"as_strided_scatter of samples: it sees memory"):
        last_of(lambda y, w: y.as_strided_scatter(y * 2, (len(y),), (1,)) * 1, "mul")


def test_windows_that_cross_no_samples_are_rows() -> None:
    within = last_of(lambda y, w: windows(y[:, None] * torch.arange(6.0), 6) * 1, "mul")
    assert within.kind is Kind.ROWS, within
    across = last_of(lambda y, w: windows(y[:, None] * torch.arange(6.0), 3) * 1, "mul")
    assert across.kind is Kind.COUPLED, across


def windows(x: Tensor, step: int) -> Tensor:
    """Windows of four numbers of `x` [n, 6], one every `step` of them."""
    count = (x.numel() - 6) // step + 1
    return x.as_strided((count, 2, 4), (step, 2, 1))
