"""Recordings for several numbers of samples are the same calls, and one sample's may be made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.ir.graph import Graph
from merakc.passes.autodiff.interpret import interpret
from merakc.passes.batches.alike import check_alike, of_one_sample
from tests.frontend.small import Small, linear, randn

WIDTH = 6


def graph(call: Callable[[Small, Tensor], Tensor], samples: int) -> Graph:
    model = Small(call, layer=linear(), other=linear())
    return record(model, (randn(samples, 5, WIDTH),), {}).graph


def swapped(s: Small, x: Tensor) -> Tensor:
    """Other operands for larger batches."""
    a, b = s.layer(x), s.other(x)
    return (a - b if len(x) > 4 else b - a).sum()


def other_output(s: Small, x: Tensor) -> Tensor:
    a, b = s.layer(x).sum(), s.other(x).sum()
    return torch.stack([a, b])[0 if len(x) > 4 else 1] + 0 * a * b


PATHS: dict[str, Callable[[Small, Tensor], Tensor]] = {
    "one by one": lambda s, x: sum((s.layer(row).sum() for row in x), torch.zeros(())),
    "another op": lambda s, x: (s.layer(x).sum() if len(x) > 4 else s.layer(x).mean()),
    "other operands": swapped,
    "another dtype": lambda s, x: (
        s.layer(x).to(torch.float32 if len(x) > 4 else torch.float16).sum()
    ),
    "more dims": lambda s, x: (
        s.layer(x).reshape((-1, WIDTH) if len(x) > 4 else (-1, 5, WIDTH)).sum()
    ),
    "another parameter": lambda s, x: (s.layer if len(x) > 4 else s.other)(x).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_another_path_is_refused(name: str) -> None:
    part, whole = graph(PATHS[name], 3), graph(PATHS[name], 8)
    with pytest.raises(RecordError, match=r"test_alike.py:\d+: for a part of 3 samples .* of 8"):
        check_alike(part, whole, 3, 8)
    check_alike(part, graph(PATHS[name], 3), 3, 8)


def test_a_call_that_goes_by_the_number_of_rows_is_told_with_its_remedy() -> None:
    def distances(s: Small, x: Tensor) -> Tensor:
        return torch.cdist(*(s.layer(x).flatten(1),) * 2).sum()

    with pytest.raises(
        RecordError, match=r"as torch\.cdist does where it is given no compute_mode"
    ):
        check_alike(graph(distances, 20), graph(distances, 40), 20, 40)


def test_numbers_and_sizes_may_differ() -> None:
    def call(s: Small, x: Tensor) -> Tensor:
        return (s.layer(x) / len(x)).reshape(len(x), -1).sum() + x.shape[0] ** -0.5

    check_alike(graph(call, 3), graph(call, 8), 3, 8)


def turned(s: Small, x: Tensor) -> Tensor:
    """Its samples are joined with heads, of which one alone is in one piece already."""
    return s.layer(x).unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)


def branched(s: Small, x: Tensor) -> Tensor:
    """As a model that takes one text for several."""
    y = s.layer(x)
    return y.cumsum(1) if len(x) == 1 else (y * 2).reshape(-1, WIDTH)[: 5 * len(x)]


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def custom(s: Small, x: Tensor) -> Tensor:
    """A function of its own on the way to what is not alike."""
    y: Tensor = Mine.apply(s.layer(x))
    return y.cumsum(1) if len(x) == 1 else y * 2


@pytest.mark.parametrize("call", [turned, branched, custom])
@pytest.mark.parametrize("many", [3, 4, 8])
def test_one_sample_takes_the_path_of_its_batch(
    call: Callable[[Small, Tensor], Tensor], many: int
) -> None:
    alone, two = graph(call, 1), graph(call, 2)
    with pytest.raises(RecordError):
        check_alike(alone, two, 1, 2)
    made = of_one_sample(alone, two, graph(call, many), many)
    made.verify()
    check_alike(made, two, 1, 2)
    values = {i.name: randn(*i.spec.shape) for i in two.inputs}
    (both,) = interpret(two, values)
    names = [i.name for i in two.inputs if i.target == "0"]
    (one,) = interpret(made, {n: v[:1] if n in names else v for n, v in values.items()})
    assert one.shape == made.specs()[made.outputs[0].ref].shape
    torch.testing.assert_close(one, both[: len(one)], rtol=1e-12, atol=1e-14)


def test_what_is_alike_is_left_as_it_is() -> None:
    alone, two = (graph(lambda s, x: s.layer(x).sum(), n) for n in (1, 2))
    assert of_one_sample(alone, two, two, 4) is alone


def squared(s: Small, x: Tensor) -> Tensor:
    y = s.layer(x).flatten(1)
    return y.sum() if len(x) == 1 else (y @ y.T).flatten().cos().sum()


def other_way(s: Small, x: Tensor) -> Tensor:
    """A function that is given something else of one sample."""
    y = s.layer(x)
    made: Tensor = Mine.apply(y.flatten()) if len(x) == 1 else Mine.apply(y).flatten()
    return made


def left_out(s: Small, x: Tensor) -> Tensor:
    y: Tensor = s.layer(x) if len(x) == 1 else Mine.apply(s.layer(x))
    return y * 2


@pytest.mark.parametrize("call", [squared, other_way, left_out])
def test_sizes_that_are_on_no_line_are_refused(call: Callable[[Small, Tensor], Tensor]) -> None:
    """A table of samples by samples; functions that one sample calls in another way, or not."""
    with pytest.raises(RecordError, match="for a part of 1 samples"):
        of_one_sample(graph(call, 1), graph(call, 2), graph(call, 4), 4)


def taken_apart(s: Small, x: Tensor) -> Tensor:
    """One by one, and alone on a path of its own."""
    y = torch.stack(s.layer(x).unbind(0))
    return y.cumsum(1) if len(x) == 1 else y * 2


def test_samples_that_are_taken_apart_say_nothing_of_one() -> None:
    with pytest.raises(RecordError, match="does something else"):
        of_one_sample(*(graph(taken_apart, n) for n in (1, 2, 8)), 8)
