"""Which module becomes one node, what it may do, and why others may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import RecordError
from merakc.frontend.opaque import Fallbacks, UntraceableError
from merakc.frontend.python.fingerprint import fingerprint
from merakc.frontend.record import Recording, record
from merakc.ir.graph import Node
from merakc.kernels.opaque import OPAQUE, find
from tests.frontend.against_eager import check
from tests.frontend.small import Small, here, linear, randn

Forward = Callable[..., Any]


def nodes(recording: Recording) -> list[Node]:
    return [n for n in recording.graph.nodes if n.op == OPAQUE]


def modules(recording: Recording) -> list[str]:
    return [find(n.args[-1]).module for n in nodes(recording)]


def wrapped(forward: Forward, outer: Forward | None = None, **parts: Any) -> nn.Module:
    """A module around another, with layers before and after it."""
    outer = outer or (lambda s, x: s.after(s.inner(s.before(x))).pow(2).sum())
    inner = Small(forward, layer=linear(), **parts)
    return Small(outer, before=linear(), inner=inner, after=linear())


def branches(s: Any, x: Tensor) -> Tensor:
    return s.layer(x) if x.sum() > 0 else s.layer(-x)


def picks(s: Any, x: Tensor) -> Tensor:
    y = s.layer(x)
    out = torch.zeros_like(y)
    for row in range(max(1, len(y[y.sum(-1) > 0]))):
        out[row] = y[row] * 2
    return out


def reads(s: Any, x: Tensor) -> Tensor:
    return s.layer(x) * sum(map(float, x.flatten()[:3].tolist())) * x.max().item()


def several(s: Any, x: Tensor, scale: float, more: dict[str, Tensor]) -> dict[str, Any]:
    y = s.layer(x[more["rows"].unique()]).sum(0) * scale
    return {"y": y, "rows": more["rows"] + 1, "scale": scale, "nothing": None}


@pytest.mark.parametrize("forward", [branches, picks, reads])
def test_the_innermost_module_is_one_node(forward: Forward) -> None:
    torch.manual_seed(0)
    recording = check(wrapped(forward), randn(4, 6), relative=1e-13)
    assert modules(recording) == ["inner"]
    (node,) = nodes(recording)
    assert node.module == "inner"
    assert len(recording.graph.nodes) == 5
    call = find(node.args[-1])
    assert call.source == here(forward, 3 if forward is picks else 1)
    assert "depends on the data" in call.reason
    assert call.flops == 2 * 4 * 6 * 6


def test_arguments_and_results_of_any_structure() -> None:
    torch.manual_seed(0)

    def outer(s: Any, x: Tensor, rows: Tensor) -> Tensor:
        found = s.inner(s.before(x), scale=2.0, more={"rows": rows})
        assert found["nothing"] is None
        out: Tensor = (found["y"] * found["scale"]).pow(2).sum() + found["rows"].sum()
        return out

    recording = check(wrapped(several, outer), randn(4, 6), torch.tensor([1, 3]), relative=1e-13)
    assert modules(recording) == ["inner"]


def test_a_tied_parameter_and_a_module_called_twice() -> None:
    torch.manual_seed(0)
    shared = linear()
    inner = Small(branches, layer=shared)
    model = Small(lambda s, x: s.inner(s.layer(s.inner(x))).pow(2).sum(), layer=shared, inner=inner)
    recording = check(model, randn(4, 6), relative=1e-13)
    assert modules(recording) == ["inner", "inner"]
    assert [i.target for i in recording.graph.inputs if i.target.endswith("weight")] == [
        "layer.weight"
    ]


def test_modules_of_one_class_are_chosen_together() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

        def forward(self, x: Tensor) -> Tensor:
            return branches(self, x)

    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(3))
    fallbacks = Fallbacks(dict(Small(lambda s: None, layers=layers).named_modules()))
    fallbacks.add(UntraceableError("text", ["", "layers.1"], "line", "reason"))
    assert list(fallbacks.causes) == ["layers.0", "layers.1", "layers.2"]

    def outer(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            x = x + layer(x)
        return x.pow(2).sum()

    recording = check(Small(outer, layers=layers), randn(4, 6), relative=1e-13)
    assert modules(recording) == ["layers.0", "layers.1", "layers.2"]


def counts(s: Any, x: Tensor) -> Tensor:
    if x.sum() > -1e9:
        s.steps += 1
        s.mean = s.mean * 0.5 + x.detach().mean() * 0.5
    return s.layer(x) * s.mean


def test_buffers_that_it_writes() -> None:
    torch.manual_seed(0)
    buffers = {"steps": torch.zeros((), dtype=torch.int64), "mean": randn(1).abs()[0]}
    recording = check(wrapped(counts, **buffers), randn(4, 6), relative=1e-13)
    assert modules(recording) == ["inner"]
    written = [o.name for o in recording.graph.outputs if o.name.startswith("inner")]
    assert sorted(written) == ["inner.mean", "inner.steps"]


def test_recorded_twice_the_graph_is_the_same() -> None:
    model, x = wrapped(branches), randn(4, 6)
    first, second = record(model, (x,), {}), record(model, (x,), {})
    assert str(first.graph) != str(second.graph)  # the keys are
    assert fingerprint(first.graph) == fingerprint(second.graph)


def test_on_the_meta_device() -> None:
    model = wrapped(branches).to("meta")
    recording = record(model, (torch.empty(4, 6, dtype=torch.float64, device="meta"),), {})
    assert modules(recording) == ["inner"]
    assert all(p.is_meta for p in model.parameters())


def without_a_forward(model: nn.Module) -> bool:
    return not any("forward" in vars(m) for m in model.modules())


# ------------------------------------------------------------------ where the module cannot be one


def ragged(s: Any, x: Tensor) -> Any:
    return s.layer(x[: 1 + int(x.sum(-1).argmax())])


def keeps(s: Any, x: Tensor) -> Any:
    s.seen = x.sum()
    return branches(s, x)


def number(s: Any, x: Tensor) -> Any:
    return s.layer(x), float(x.detach().sum())


def writes(s: Any, x: Tensor) -> Any:
    if x.sum() > -1e9:
        x.mul_(2)
    return s.layer(x)


def thing(s: Any, x: Tensor) -> Any:
    return s.layer(x) * float(x.detach().sum()), object()


WHY: dict[str, tuple[Forward, str]] = {
    "ragged": (ragged, "the shapes of what it returns depend on the data"),
    "keeps": (keeps, "it leaves tensors in attributes: seen"),
    "number": (number, "it returns a number that depends on the data"),
    "writes": (writes, "it writes to its arguments or parameters"),
    "thing": (thing, "it returns objects that are no tensors"),
}


@pytest.mark.parametrize("name", WHY)
def test_the_module_around_it_is_tried_next(name: str) -> None:
    torch.manual_seed(0)
    forward, why = WHY[name]

    def middle(s: Any, x: Tensor) -> Tensor:
        found = s.inner(s.layer(x))
        found = found[0] * 1.0 if isinstance(found, tuple) else found
        return s.layer(found).sum(0)

    class Middle(Small):
        pass

    inner = Small(forward, layer=linear())
    around = Middle(middle, layer=linear(), inner=inner)
    model = nn.Sequential(linear(), around, linear())
    whole = Small(lambda s, x: s.parts(x).pow(2).sum(), parts=model)
    if name == "keeps":  # what holds the module could read it, and whoever holds that
        with pytest.raises(RecordError, match="depends on the data"):
            record(whole, (randn(4, 6),), {})
    else:
        assert modules(check(whole, randn(4, 6), relative=1e-13)) == ["parts.1"]

    alone = Small(lambda s, x: s.inner(s.before(x)), before=linear(), inner=inner)
    with pytest.raises(RecordError, match="depends on the data") as caught:
        record(alone, (randn(4, 6),), {})
    assert f"module 'inner' cannot run as it is either: {why}" in caught.value.__notes__
    assert without_a_forward(alone)


def test_a_module_that_is_given_an_object() -> None:
    class Cache:
        pass

    def with_cache(s: Any, x: Tensor, cache: Any) -> Tensor:
        return branches(s, x)

    model = wrapped(with_cache, lambda s, x: s.inner(s.before(x), Cache()).sum())
    with pytest.raises(RecordError, match="depends on the data") as caught:
        record(model, (randn(4, 6),), {})
    assert any("an object of type Cache" in note for note in caught.value.__notes__)


# ------------------------------------------------------------------ when it runs


def first_only(s: Any, x: Tensor) -> Tensor:
    if x.max() > 1e3:
        x.mul_(2)
    if x.min() < -1e3:
        s.steps += 1
    return s.layer(x[(x < 1e6).all(-1)])


def test_what_no_trial_did_is_an_error() -> None:
    model = wrapped(first_only, steps=torch.zeros((), dtype=torch.int64))
    recording = record(model, (randn(4, 6),), {})
    (node,) = nodes(recording)
    call = find(node.args[-1])
    inner = model.inner
    state = [inner.layer.weight, inner.layer.bias, inner.steps]
    x = randn(4, 6)
    _, steps = call([x - 2e3, *state])
    assert (steps.item(), inner.steps.item()) == (1, 0)  # a branch that no trial took
    with pytest.raises(RecordError, match="did on no random arguments: it writes to its arg"):
        call([x + 2e3, *state])
    x[0] = 1e7
    model.inner.function = lambda s, x: s.layer(x[(x < 1e6).all(-1)])
    with pytest.raises(RecordError, match=r"Small runs as it is .* it returns other shapes"):
        call([x, *state])


def asks_a_tensor(s: Any, x: Tensor) -> Tensor:
    y = branches(s, x)
    return y * 3 if y.requires_grad else y


def asks_for_the_mode(s: Any, x: Tensor) -> Tensor:
    return branches(s, x) * (3 if torch.is_grad_enabled() else 1)


@pytest.mark.parametrize("forward", [asks_a_tensor, asks_for_the_mode])
def test_a_module_that_asks_for_gradients_cannot_be_a_node(forward: Forward) -> None:
    """Its forward runs without any, and would take another branch than its backward."""
    with pytest.raises(RecordError) as caught:
        record(wrapped(forward), (randn(4, 6),), {})
    assert any("it asks whether" in note for note in caught.value.__notes__)


def by_numpy(s: Any, x: Tensor, lengths: Tensor) -> Any:
    rows = zip(s.layer(x), lengths.numpy(), strict=True)
    return torch.stack([row[: int(n)].sum() for row, n in rows]).sum()


def test_numpy_reads_whole_numbers_of_the_batch() -> None:
    check(Small(by_numpy, layer=linear()), randn(3, 6), torch.tensor([2, 5, 1]))


def in_double(s: Any, x: Tensor) -> Any:
    """Makes tensors in a dtype that holds for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return (s.layer(x) * torch.ones(6) / torch.full((6,), 3.0)).sum() + s.inner(x).sum()
    finally:
        torch.set_default_dtype(before)


def test_tensors_are_of_the_dtype_that_held_when_they_were_made() -> None:
    def ones(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        return y @ torch.ones(6, 6) if y.sum() > 0 else y + torch.ones(6)

    recording = check(
        Small(in_double, layer=linear(), inner=Small(ones, layer=linear())), randn(4, 6)
    )
    assert modules(recording) == ["inner"]
