"""What stands in for calls while a forward is recorded: other threads go on as before."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from merakc.errors import RecordError
from merakc.frontend.record import record
from merakc.frontend.replaced import replaced


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call returns, or raises, in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Question:
    @property
    def answer(self) -> str:
        return "plain"


def test_a_call_is_replaced_in_one_thread() -> None:
    place = SimpleNamespace(call=lambda: "plain")
    with replaced(place, "call", lambda: "other"):
        assert (place.call(), elsewhere(lambda: place.call())) == ("other", "plain")
        with replaced(place, "call", lambda: "inner"):
            assert (place.call(), elsewhere(lambda: place.call())) == ("inner", "plain")
        assert place.call() == "other"
    assert place.call() == "plain"
    asked = Question()
    with replaced(Question, "answer", property(lambda _: "other")):
        assert (asked.answer, elsewhere(lambda: asked.answer)) == ("other", "plain")
    assert asked.answer == "plain"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def trained() -> float:
    """What a thread of the user's may do: a step of another model, with a function of its own.

    It draws nothing: numbers of torch's common generator would seem to be the forward's.
    """
    weight = torch.ones(2, requires_grad=True)
    Doubled.apply(OTHER.double().float()(weight)).sum().backward()
    assert weight.grad is not None
    assert not torch.compiler.is_compiling()
    return float(max(torch.tensor([weight.grad.numel()]), torch.tensor([1])))


# Each is refused, or answered otherwise, where the forward itself does it.
CALLS: dict[str, Callable[[], Any]] = {
    "sends objects": lambda: dist.distributed_c10d._object_to_tensor(
        {"a": 1}, torch.device("cpu"), None  # type: ignore[arg-type]
    )[1].item() > 0,
    "draws from the system": lambda: len(str(uuid.uuid4())) == 36,
    "trains": lambda: trained() == 2.0,
    "writes a file": lambda: open("/dev/null", "w").close() is None,
    "reads a clock": lambda: abs(time.time() - NOW) < 3600,
}  # fmt: skip
NOW = time.time()
OTHER = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("what", CALLS)
def test_other_threads_run_while_a_forward_is_recorded(what: str) -> None:
    class Busy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if (found := elsewhere(CALLS[what])) is not True:
                raise AssertionError(f"{what}: {found!r}")
            return super().forward(x)

    record(Busy(2, 2), (torch.ones(3, 2),), {})


def test_the_forward_itself_is_still_refused() -> None:
    class Busy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CALLS["sends objects"]()
            return super().forward(x)

    with pytest.raises(RecordError, match="objects are sent"):
        record(Busy(2, 2), (torch.ones(3, 2),), {})
