"""What tensors carry beside their values is in the recording, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import merakc
from merakc.errors import MerakWarning, RecordError
from merakc.frontend.python.plain_tensors import check_memory
from merakc.machines.cluster import NOMINAL_CPU


class Own(torch.Tensor):
    """A class of the user's."""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 3)
        self.register_buffer("scales", torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.c(x) * self.scales, y)
        return loss * getattr(self.c.weight, "factor", 1.0) * getattr(self.scales, "factor", 1.0)


def batch(samples: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(samples)
    return {"x": torch.randn(samples, 4), "y": torch.randint(3, (samples,))}


def parallel(model: nn.Module, given: dict[str, Any] | None = None, **how: Any) -> Any:
    return merakc.auto_parallel(
        model, batch() if given is None else given, cluster=NOMINAL_CPU, **how
    )


def test_attributes_of_parameters_and_buffers_are_seen() -> None:
    plain = Head()
    plain.c.weight.factor, plain.scales.factor = 2.0, 3.0  # type: ignore[assignment]
    model = parallel(copy.deepcopy(plain))  # which leaves attributes of parameters away
    assert torch.allclose(model(**batch()), plain(**batch()) / 2)
    given = copy.deepcopy(plain)
    given.c.weight.factor, given.scales.factor = 2.0, 3.0  # type: ignore[assignment]
    model = parallel(given)
    assert model.c.weight.factor == 2.0  # as those that sort parameters by attributes see it
    assert model.scales.factor == 3.0
    for samples in (4, 6):  # another shape is recorded anew
        assert torch.allclose(model(**batch(samples)), plain(**batch(samples)))


def _own_class(model: Head) -> None:
    model.register_buffer("scales", torch.ones(3).as_subclass(Own))


def _gradient(model: Head) -> None:
    model.scales.requires_grad_()


def _held(model: Head) -> None:
    model.c.weight.partner = model.c.bias  # type: ignore[assignment]


def _key(model: Head) -> None:
    model.rates = {model.c.weight: 1.0}  # type: ignore[assignment]


def _identity(model: Head) -> None:
    model.rates = [{id(model.c.weight)}]  # type: ignore[assignment]


def _memory(model: Head) -> None:
    model.view = model.c.weight.detach().t()  # type: ignore[assignment]


def _two_parameters(model: Head) -> None:
    model.again = nn.Parameter(model.c.weight.data[1:])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_own_class, "buffer 'scales' is a .*Own"), (_gradient, "requires a gradient"),
        (_held, "'c.weight' has an attribute 'partner' that holds a tensor"),
        (_key, "rates holds 'c.weight' as a key"),
        (_identity, "holds 'c.weight' as a key, or its id"),
        (_memory, "'c.weight' is written to, .* 'view' is in the same memory"),
        (_two_parameters, "in the same memory"),
    ],
)  # fmt: skip
def test_what_no_recording_has_is_refused(change: Any, told: str) -> None:
    model = Head()
    change(model)
    with pytest.raises(RecordError, match=told):
        parallel(model)


def test_memory_that_nobody_writes_to_may_be_shared() -> None:
    model = Head()
    model.first = model.scales[:2]  # type: ignore[assignment]
    model.c.bias.requires_grad_(False)
    model.shown = model.c.bias.detach()  # type: ignore[assignment]
    plain = copy.deepcopy(model)
    assert torch.allclose(parallel(model)(**batch()), plain(**batch()))


def test_all_pairs_in_one_memory_are_found() -> None:
    whole = torch.zeros(10)
    tensors = {"whole": whole, "first": whole[:2], "last": whole[8:], "other": torch.zeros(10)}
    check_memory(tensors, {"other"})
    for name in ("first", "last"):
        with pytest.raises(RecordError, match=f"'{name}' is written to, .* 'whole' is in the same"):
            check_memory(tensors, {name})


def test_tensors_of_a_batch_are_plain() -> None:
    model = parallel(Head())
    own = {**batch(), "x": batch()["x"].as_subclass(Own)}
    with pytest.raises(RecordError, match=r"'x' of the batch is a .*Own"):
        model(**own)
    for name in ("factor", "_factor"):
        told = batch()
        setattr(told["x"], name, 2.0)
        with pytest.raises(RecordError, match=rf"'x' of the batch has attributes .* \({name}\)"):
            model(**told)


def _adjacency() -> Tensor:
    return torch.tensor([[0.0, 1, 0, 0], [1, 0, 2, 0], [0, 1, 0, 1], [3, 0, 0, 1]]).to_sparse()


class Neighbours(nn.Module):
    """A sum over the neighbours in a graph, by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.adjacency = _adjacency()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.sparse.mm(self.adjacency, x * self.w)
        return found


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(4, 4), Neighbours(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)).relu()).square().mean()


def test_modules_of_sparse_matrices_run_as_they_are() -> None:
    plain, x = Graphs(), torch.linspace(-1, 1, 16).view(4, 4)
    with pytest.warns(MerakWarning, match="'inner' cannot be recorded and runs as it is.*sparse"):
        model = parallel(Graphs(), {"x": x})
    for one in (plain, model):
        one(x=x).backward()
    assert torch.allclose(model(x=x), plain(x))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)


def _as_parameter(model: Head) -> None:
    model.c.weight = nn.Parameter(model.c.weight.detach().to_sparse())


def _as_buffer(model: Head) -> None:
    model.register_buffer("more", _adjacency().to_sparse_csr())


class Odd(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.w, self.make = nn.Parameter(torch.ones(4)), make

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.make(x) @ self.w.outer(self.w)).sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [_as_parameter, _as_buffer])
def test_parameters_and_buffers_are_dense(change: Any) -> None:
    model = Head()
    change(model)
    with pytest.raises(RecordError, match=r"is a torch.sparse_.*give a dense one"):
        parallel(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        lambda x: torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), x[0, :1], (4, 4)),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    ],
)
def test_values_are_dense(make: Any) -> None:
    with pytest.raises(
        RecordError, match=r"test_plain_tensors\.py:\d+: .* and merakc records dense"
    ):
        parallel(Odd(make))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        lambda x: torch.nested.nested_tensor([x[0], x[1, :2]]),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ],
)
def test_batches_are_dense(make: Any) -> None:
    model, odd = parallel(Head()), {**batch(), "x": make(batch()["x"])}
    for refused in (lambda: parallel(Head(), odd), lambda: model(**odd)):
        with pytest.raises(RecordError, match=r"'x' of the batch is a .* tensor.*give a dense one"):
            refused()
    with pytest.raises(RecordError, match="'x' of the batch is on the meta device"):
        model(**{**batch(), "x": batch()["x"].to("meta")})


class Cleaned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(5, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels[labels == 0] = 1
        return F.cross_entropy(self.e(ids).flatten(0, 1), labels.flatten())


def test_what_is_written_to_a_batch_is_not_in_another_tensor_of_it() -> None:
    ids = torch.arange(20).reshape(4, 5) % 5
    plain = Cleaned()
    model = parallel(copy.deepcopy(plain), {"ids": ids, "labels": ids.clone()})
    given = {"ids": ids, "labels": ids.clone()}
    assert torch.allclose(model(**given), plain(ids, ids.clone()))
    for labels in (ids, ids.view(4, 5)):
        with pytest.raises(RecordError, match=r"'labels' is written to, .* 'ids' is in the same"):
            model(ids=ids, labels=labels)


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.c(x), y)
        return loss * (2.0 if "0" in f"{y[0]}" else 1.0)


def test_a_tensor_that_is_made_a_text_is_refused() -> None:
    with pytest.raises(RecordError, match=r"test_plain_tensors.py:\d+: a tensor is made a text"):
        parallel(Telling())
