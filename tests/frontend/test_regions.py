"""Parts of a forward whose shapes depend on values: what becomes one node, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.python.fingerprint import fingerprint
from merakc.frontend.record import Recording, opaque_share, record
from merakc.frontend.regions import Region
from merakc.kernels.opaque import OPAQUE, Call, find
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph, same
from tests.frontend.small import Small, here, linear, randn

MASK = torch.arange(6) < torch.tensor([6, 3, 5, 2])[:, None]
Forward = Callable[..., Any]


def calls(recording: Recording) -> list[Call]:
    return [find(n.args[-1]) for n in recording.graph.nodes if n.op == OPAQUE]


def ops(recording: Recording) -> list[list[str]]:
    """The calls of each region."""
    regions = [call.forward for call in calls(recording)]
    assert all(isinstance(r, Region) for r in regions)
    return [[n.op.split(".")[1] for n in r.nodes] for r in regions if isinstance(r, Region)]


def ragged(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return y[m].pow(2).mean()


def own(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return y[y > 0].sum() + y.pow(2).sum()


def put(s: Any, y: Tensor, m: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[m] = s.after(y)[m] * 2
    return (out * y).sum()


def through(s: Any, y: Tensor, m: Tensor) -> Tensor:
    chosen = y[m]
    scale = s.after(torch.stack([chosen.mean()] * 6)).tanh().sum()
    return (chosen * scale).sum()


def twice(s: Any, y: Tensor, m: Tensor) -> Tensor:
    where = m.nonzero()
    one = y[where[:, 0], where[:, 1]].mean()
    return one + s.after(y)[where[:, 0], where[:, 1]].pow(2).mean()


def counted(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return y.repeat_interleave(m.sum(-1), 0).pow(2).mean()


def chosen(s: Any, y: Tensor, m: Tensor) -> Tensor:
    return y[m.sum(-1).unique() - 3].pow(2).mean()


REGIONS: dict[Forward, list[list[str]]] = {
    ragged: [["nonzero", "unbind", "index", "pow", "mean"]],
    own: [["index", "sum"]],
    put: [["nonzero", "unbind", "index", "mul", "index_put"]],
    # What stands between two of its calls is inside.
    through: [["nonzero", "unbind", "index", "mean", "stack", "linear", "tanh", "sum", "mul",
               "sum"]],
    # The places of a mask are made again for each of their readers.
    twice: [["nonzero", "select", "select", "index", "mean"],
            ["nonzero", "select", "select", "index", "pow", "mean"]],
    counted: [["repeat_interleave", "index_select", "pow", "mean"]],
    chosen: [["_unique2", "sub", "index", "pow", "mean"]],
}  # fmt: skip


@pytest.mark.parametrize("forward", REGIONS)
def test_a_region_is_one_node(forward: Forward) -> None:
    torch.manual_seed(0)
    model = Small(lambda s, x, m: forward(s, s.layer(x), m), layer=linear(), after=linear())
    recording = check(model, randn(4, 6), MASK, relative=1e-12)
    assert ops(recording) == REGIONS[forward]
    assert recording.reads is None
    fewer = randn(4, 6), MASK & (torch.arange(6) != 1)
    found = run_graph(recording.graph, inputs_of(recording.graph, model, fewer, {}))
    same(found, run_eager(model, fewer, {}), model, 1e-12)


def test_a_region_says_where_it_is_from() -> None:
    model = Small(lambda s, x, m: ragged(s, s.layer(x), m), layer=linear())
    (call,) = calls(record(model, (randn(4, 6), MASK), {}))
    assert call.source == here(ragged, 1)
    assert call.reason == "shapes or numbers depend on the data"


def test_a_call_that_does_not_take_its_values_is_told_with_its_line() -> None:
    model = Small(lambda s, x, m: ragged(s, s.layer(x), m), layer=linear())
    (call,) = calls(record(model, (randn(4, 6), MASK), {}))
    with pytest.raises(RecordError, match=f"{here(ragged, 1)}: this call fails on"):
        call([randn(4, 6), torch.ones(5, 6, dtype=torch.bool)])


def test_its_arithmetic_is_counted_for_all_that_may_be_chosen() -> None:
    def chosen(s: Any, x: Tensor) -> Tensor:
        return s.layer(x[s.layer(x).sum(1) > 0]).sum()

    (call,) = calls(record(Small(chosen, layer=linear()), (randn(4, 6),), {}))
    assert call.flops == 2 * 4 * 6 * 6


def test_where_much_would_run_as_it_is_the_batch_settles_the_shapes() -> None:
    def chosen(s: Any, x: Tensor, m: Tensor) -> Tensor:
        return s.layer(torch.dropout(s.layer(x)[m], 0.0, True)).square().mean()

    model, batch = Small(chosen, layer=linear()), (randn(4, 6), MASK[:, 0])
    recording = record(model, batch, {})
    assert opaque_share(recording.graph) == 0
    found = run_graph(recording.graph, inputs_of(recording.graph, model, batch, {}))
    same(found, run_eager(model, batch, {}), model, 1e-12)
    assert recording.reads is not None
    assert recording.reads.answers == recording.reads.of({"0": batch[0], "1": MASK[:, 0]})
    assert recording.reads.answers != recording.reads.of({"0": batch[0], "1": ~MASK[:, 0]})


def test_little_stays_as_it_is_for_any_number_of_places() -> None:
    recording = record(Small(lambda s, x, m: s.layer(x)[m].mean(), layer=linear()),
                       (randn(4, 6), MASK), {})  # fmt: skip
    assert recording.reads is None
    assert len(calls(recording)) == 1


def test_what_a_region_computes_is_part_of_its_identity() -> None:
    def recorded(power: int) -> Any:
        model = Small(lambda s, x, m: s.layer(x)[m].pow(power).mean(), layer=linear())
        return fingerprint(record(model, (randn(4, 6), MASK), {}).graph)

    assert recorded(2) == recorded(2)
    assert recorded(2) != recorded(3)


def test_without_anything_chosen() -> None:
    def forward(s: Any, x: Tensor, m: Tensor) -> Tensor:
        return s.layer(x)[m].sum() + s.layer(x).mean()

    model = Small(forward, layer=linear())
    recording = record(model, (randn(4, 6), MASK), {})
    none = randn(4, 6), torch.zeros_like(MASK)
    found = run_graph(recording.graph, inputs_of(recording.graph, model, none, {}))
    same(found, run_eager(model, none, {}), model, 1e-12)


def test_a_result_of_such_a_shape_is_refused() -> None:
    def forward(s: Any, x: Tensor, m: Tensor) -> Any:
        y = s.layer(x)
        return {"loss": y.sum(), "rows": y[y > 0]}

    with pytest.raises(
        RecordError, match="the shape of 'rows', which the forward returns"
    ) as error:
        record(Small(forward, layer=linear()), (randn(4, 6), MASK), {})
    assert str(error.value).startswith(here(forward, 2))


def test_draws_in_a_region_are_refused() -> None:
    def forward(s: Any, x: Tensor, m: Tensor) -> Tensor:
        y = s.layer(x)
        return torch.dropout(y[y > 0], 0.5, True).mean()

    with pytest.raises(RecordError, match="random numbers"):
        record(Small(forward, layer=linear()), (randn(4, 6), MASK), {})
