"""What forwards do to their batch, and check of it: found by the recorder, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from merakc.errors import RecordError
from merakc.frontend.aside import Check, Edit, Kept, Made, at, edited, path_of
from merakc.frontend.record import record
from merakc.ir.graph import OutputKind
from tests.frontend.small import Small, here, linear, randn

Forward = Callable[[Any, Any], Any]


def recorded(act: Forward, batch: Any) -> Any:
    def forward(s: Any, b: Any) -> Any:
        act(s, b)
        x = b["x"] if isinstance(b, dict) else b
        return s.layer(x.reshape(-1, 6)).square().sum()

    return record(Small(forward, layer=linear()), (batch,), {})


def outputs(found: Any) -> list[str]:
    return [o.name for o in found.everything.outputs if o.kind is OutputKind.ASIDE]


def raises(s: Any, x: Tensor) -> None:
    if (x > 3).any():
        raise ValueError


def asserts(s: Any, x: Tensor) -> None:
    assert (x < 3).all()


CHECKS: dict[str, tuple[Forward, bool]] = {
    "if": (raises, False),
    "assert": (asserts, True),
    "torch": (lambda s, x: torch._check_tensor_all(x < 3), True),
    "later": (lambda s, x: torch._assert_async((x < 3).all()), True),
    "of a class": (lambda s, x: torch.nn.functional.one_hot((x[:, 0] > 3).long(), 1), True),
    "of all classes": (lambda s, x: torch.nn.functional.one_hot((x[:, 0] > 3).long()), True),
    "of a matrix": (lambda s, x: torch.linalg.cholesky(x.T @ x), True),
    "of an inverse": (lambda s, x: torch.linalg.inv(x.T @ x), True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_the_batch_become_outputs(name: str) -> None:
    act, wanted = CHECKS[name]
    found = recorded(act, randn(4, 6))
    assert {(c.wanted, c.name) for c in found.aside.checks} == {(wanted, n) for n in outputs(found)}
    assert all("test_aside.py:" in c.source for c in found.aside.checks)
    assert found.aside.checks
    assert not any(o.kind is OutputKind.ASIDE for o in found.graph.outputs)
    assert found.aside.unheard == ()


def test_checks_of_other_values_are_named() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        y = s.layer(x)
        assert (y < 1e3).all()
        print("forward")  # noqa: T201
        loss = y.square().sum()
        if torch.isnan(loss):  # which a finite loss proves
            raise ValueError
        return loss

    found = record(Small(forward, layer=linear()), (randn(4, 6),), {})
    assert not found.aside
    assert [line.rpartition(", at ")[2] for line in found.aside.unheard] == [
        here(forward, 3), here(forward, 2),
    ]  # fmt: skip
    assert found.finite == (here(forward, 5),)


def put(s: Any, b: Any) -> None:
    b["n"], b["made"], b["old"] = 3, b["x"].sum(1), b.pop("y")


def test_what_is_done_to_containers() -> None:
    found = recorded(put, {"x": randn(4, 6), "y": randn(4)})
    (edit,) = found.aside.edits
    made = dict(edit.items)
    assert edit.path == (0, 0)
    assert made == {
        "x": Kept((0, 0, "x")), "n": 3, "made": Made(outputs(found)[0]), "old": Kept((0, 0, "y")),
    }  # fmt: skip
    x, y, new = randn(4, 6), randn(4), randn(4)
    batch = ({"x": x, "y": y},), {}
    edited(found.aside.edits, batch, {outputs(found)[0]: new})
    assert list(batch[0][0]) == ["x", "n", "made", "old"]
    assert all(batch[0][0][n] is v for n, v in (("x", x), ("made", new), ("old", y)))
    assert at(batch, (0, 0, "n")) == 3
    assert path_of((1, "b", "x")) == "batch['b']['x']"


def test_what_is_written_to() -> None:
    def write(s: Any, b: Any) -> None:
        b["x"][:, 0] = 1
        b["z"].t()[1].add_(b["y"])

    found = recorded(write, {"x": randn(4, 6), "y": randn(4), "z": randn(4, 2)})
    assert [name for name, _ in found.aside.writes] == ["0.x", "0.z"]
    assert [name for _, name in found.aside.writes] == outputs(found)
    assert found.aside.edits == ()


def parameters_put(s: Any, b: Any) -> None:
    b["h"] = s.layer(b["x"])


def parameters_written(s: Any, b: Any) -> None:
    b["x"].mul_(s.layer.bias)


REFUSED: dict[str, tuple[Forward, str]] = {
    "parameters put": (parameters_put, r"puts a FakeTensor into batch\[0\] of the batch"),
    "parameters written": (parameters_written, r"py:\d+: the forward writes to '0.x' of the batch"),
    "a shape": (lambda s, b: b["x"].unsqueeze_(0), "changes the shape of '0.x' of the batch"),
    "an attribute": (lambda s, b: setattr(b["x"], "seen", True), "sets attributes of '0.x'"),
    "a gradient": (lambda s, b: b["x"].requires_grad_(), "tensor of the batch is switched on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_step_can_do_is_refused(name: str) -> None:
    act, message = REFUSED[name]
    with pytest.raises(RecordError, match=message):
        recorded(act, {"x": randn(4, 6), "y": randn(4)})


def test_nothing_is_seen_where_nothing_is_done() -> None:
    found = recorded(lambda s, b: dict(b, x=1), {"x": randn(4, 6), "y": [randn(4), 1]})
    assert (found.aside.checks, found.aside.writes, found.aside.edits) == ((), (), ())
    assert found.full is None
    assert Check("a", True, "b") == Check("a", True, "b")
    assert Edit((), ()) == Edit((), ())
