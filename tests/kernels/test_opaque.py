"""The op that runs a module as it is: gradients, random numbers, memory of its own."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from merakc.kernels.opaque import Call, enter, find, opaque, opaque_backward

F64 = torch.float64
SPECS = (((2, 3), F64), ((2,), torch.int64), ((3, 4), F64))
SEED = [torch.tensor(3)]


def forward(inputs: Sequence[Tensor]) -> list[Tensor]:
    """A product with noise, an index, and one of the inputs as it is."""
    x, weight, _unused = inputs
    y = x @ weight.t()
    noise = torch.rand(3, dtype=F64) + random.random() + np.random.rand()
    return [y * noise, y.argmax(-1), weight]


def noise(number: int = 0) -> Tensor:
    """What the forward draws."""
    call = Call(lambda inputs: [forward([*inputs, inputs[0]])[0]], SPECS[:1], number=number)
    ones = torch.ones(2, 3, dtype=F64), torch.eye(3, dtype=F64)
    return opaque(ones, SEED, enter(call))[0]


@pytest.fixture
def call() -> Call:
    return Call(forward, SPECS, "layers.0")


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=F64).requires_grad_() for shape in ((2, 4), (3, 4), (5,))]


def test_the_gradients_are_those_of_the_module(call: Call) -> None:
    given = inputs()
    out, index, copy = torch.ops.merakc.opaque(given, SEED, enter(call))
    assert not index.requires_grad
    assert copy.untyped_storage().data_ptr() != given[1].untyped_storage().data_ptr()
    x, weight, _ = given
    drawn = (out / (x @ weight.t())).detach()
    (out.sum() + copy.pow(2).sum()).backward()
    torch.testing.assert_close(x.grad, drawn @ weight)
    torch.testing.assert_close(weight.grad, drawn.t() @ x + 2 * weight)
    assert given[2].grad is not None
    assert not given[2].grad.any()  # it is not read


def test_only_what_is_wanted_is_differentiated(call: Call) -> None:
    given = [x.detach() for x in inputs()]
    key, grad = enter(call), torch.ones(2, 3, dtype=F64)
    with torch.no_grad():
        (found,) = torch.ops.merakc.opaque_backward(
            [grad, None, None], given, SEED, key, [False, True, False]
        )
        (direct,) = opaque_backward([grad, None, None], given, SEED, key, [False, True, False])
        drawn = opaque(given, SEED, key)[0] / (given[0] @ given[1].t())
    torch.testing.assert_close(found, drawn.t() @ given[0])
    assert torch.equal(found, direct)


def test_gradients_have_memory_of_their_own() -> None:
    call = Call(lambda given: [given[0] + given[1]], (((2,), F64),))
    grad = torch.ones(2, dtype=F64)
    one, other = opaque_backward([grad], [grad * 2, grad * 3], [], enter(call), [True, True])
    places = {t.untyped_storage().data_ptr() for t in (one, other, grad)}
    assert len(places) == 3


def test_numbers_follow_from_the_seeds_and_nothing_is_drawn_outside() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert torch.equal(noise(), noise())
    assert not torch.equal(noise(0), noise(1))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_shapes_are_known_without_running() -> None:
    def never(_: Sequence[Tensor]) -> list[Tensor]:
        raise AssertionError

    call = Call(never, SPECS)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in inputs()]
        found = torch.ops.merakc.opaque(given, [], enter(call))
        assert [(tuple(x.shape), x.dtype) for x in found] == list(SPECS)


def test_a_key_holds_as_long_as_its_call(call: Call) -> None:
    own = Call(forward, SPECS, "layers.1")
    key = enter(own)
    assert key.startswith("layers.1 at 0x")
    assert find(key) is own
    assert enter(call) != key
    del own
    gc.collect()
    with pytest.raises(KeyError):
        find(key)
