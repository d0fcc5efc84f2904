"""Steps in an arena give the bits of steps without one, whatever its plan says.

In processes of their own: the allocator stays before torch's.
"""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest
import torch

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from benchmarks.reference import step_batch
from merakc.errors import ConfigError
from merakc.runtime.arena import places as module
from merakc.runtime.arena.places import Places

CPU, STEPS = torch.device("cpu"), 5
SIZE = 1 << 12
PLACED = 7  # of `small_step`: its values, and four numbers, which torch makes tensors


def alone(call: Any, *given: object) -> Any:
    return run_ranks(1, call, *given)[0]


def places_of(model: Any) -> Places:
    (step,) = model._own("_steps").compiled.values()
    found = step.executor.places
    assert isinstance(found, Places)
    return found


def trained(name: str, options: dict[str, Any], arena: bool, how: str = "") -> Any:
    """The losses, the weights, and how the last step went."""
    case = MODELS[name]
    batch = step_batch(case, 8, torch.float32, 0)
    torch.manual_seed(0)
    model = merakc.auto_parallel(case.model(), batch, arena=arena, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, kept = [], []
    for k in range(STEPS):
        optimizer.zero_grad(set_to_none=how != "gradients stay")
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kept.append(loss)  # as users do who plot it
        if how == "all at one place" and k == 2:
            _sabotage(places_of(model))
    weights = {n: w.detach().clone() for n, w in model.state_dict().items() if how != "parts"}
    return losses, weights, places_of(model).figures() if arena else None


def _sabotage(found: Places) -> None:
    """Gives every request the first place of all."""
    requests = np.empty((found.requests, 4), dtype=np.int64)
    found.library.arena_requests(requests.ctypes.data)
    rows = np.column_stack((requests[:, :2], np.zeros(len(requests), dtype=np.int64)))
    found.give(np.ascontiguousarray(rows), found.size_bytes)


CASES = {
    "one rank": ("llama", {"micro_batches": 2}, 1),
    "by block": ("gpt2", {"recompute": "full", "micro_batches": 2}, 1),
    "buffers": ("resnet", {"micro_batches": 2}, 1),
    "pipeline": ("llama", {"pp": 2, "micro_batches": 4}, 2),
    "halves": ("gpt2", {"pp": 2, "micro_batches": 4, "schedule": "zb-h1"}, 2),
    "tp": ("gpt2", {"tp": 2, "micro_batches": 2}, 2),
    "sharded": ("llama", {"dp": 2, "micro_batches": 2, "state_shards": "zero-3"}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_in_an_arena_have_the_same_bits(case: str) -> None:
    name, options, ranks = CASES[case]
    plain = run_ranks(ranks, trained, name, options, False, "parts")
    placed = run_ranks(ranks, trained, name, options, True, "parts")
    for (expected, _, _), (losses, _, figures) in zip(plain, placed, strict=True):
        assert losses == expected
        assert figures.bound_bytes <= figures.size_bytes <= 1.05 * figures.bound_bytes
        assert figures.placed > 0
        # Of several ranks what is being communicated may still be there, as long as it takes.
        assert ranks > 1 or not figures.missed


@pytest.mark.parametrize("how", ["all at one place", "gradients stay"])
def test_a_wrong_plan_takes_more_memory_and_changes_nothing(how: str) -> None:
    options = {"micro_batches": 2}
    expected = alone(trained, "gpt2", options, False)
    losses, weights, figures = alone(trained, "gpt2", options, True, how)
    assert losses == expected[0]
    for name, weight in expected[1].items():
        assert torch.equal(weights[name], weight)
    assert figures.placed > 0
    if how == "all at one place":
        assert figures.missed > figures.placed


def small_step(found: Places, size: int = SIZE) -> tuple[int, ...]:
    """Where three values lie, of which the third is made when the first has been freed."""
    with found.step():
        found.begin(0)
        a = torch.ones(size)
        b = a + 1
        at = a.data_ptr()
        del a
        found.begin(1)
        c = b * 2
        return at, b.data_ptr(), c.data_ptr()


def addresses() -> Any:
    found = Places(CPU)
    steps = [small_step(found) for _ in range(4)]
    return steps, found.figures()


def test_values_lie_at_the_same_place_in_every_step() -> None:
    steps, figures = alone(addresses)
    assert steps[2] == steps[3] != steps[1]
    a, b, c = steps[3]
    assert a == c
    assert abs(a - b) == 4 * SIZE
    assert 8 * SIZE < figures.size_bytes == figures.bound_bytes < 9 * SIZE
    assert (figures.placed, figures.missed) == (PLACED, 0)


def otherwise() -> Any:
    found = Places(CPU)
    for _ in range(3):
        small_step(found)
    small_step(found, SIZE + 1)
    larger = found.figures()
    small_step(found)
    return larger, found.figures()


def test_requests_of_other_sizes_come_from_elsewhere() -> None:
    larger, again = alone(otherwise)
    assert (larger.placed, larger.missed, larger.missed_bytes) == (PLACED - 3, 3, 12 * (SIZE + 1))
    assert (again.placed, again.missed) == (PLACED, 0)


def few() -> Any:
    module.MOST_PLACED = 2  # type: ignore[misc]
    found = Places(CPU)
    for _ in range(3):
        small_step(found)
    return found.figures()


def test_of_very_many_requests_the_largest_have_places() -> None:
    figures = alone(few)
    assert (figures.placed, figures.missed, figures.size_bytes) == (2, 0, 8 * SIZE)


def held() -> Any:
    found = Places(CPU)
    kept = []
    for k in range(5):
        with found.step():
            found.begin(0)
            one = torch.full((SIZE,), float(k))
            other = one + 1
        if k > 2:
            kept.append(other)
        del one, other
    figures = found.figures()
    del found
    gc.collect()
    return [t.unique().tolist() for t in kept], figures


def test_what_a_user_keeps_stays_even_without_the_arena() -> None:
    values, figures = alone(held)
    assert values == [[4.0], [5.0]]
    assert (figures.placed, figures.missed) == (3, 1)  # the one that is kept was in the way


def failing() -> Any:
    found = Places(CPU)
    small_step(found)
    with pytest.raises(RuntimeError, match="must match"), found.step():
        torch.ones(SIZE) + torch.ones(SIZE + 1)
    small_step(found)
    assert not found.arena
    small_step(found)
    return found.figures()


def test_a_step_that_fails_is_not_the_recorded_one() -> None:
    assert alone(failing).placed == PLACED


def poisoned() -> int:
    found = Places(CPU)
    for _ in range(3):
        at = small_step(found)[0]
    return ctypes.c_uint32.from_address(at).value


def test_what_is_freed_is_written_over_in_tests() -> None:
    assert module.CHECKED
    assert alone(poisoned) == 0xFFFFFFFF


def two_at_once() -> Any:
    first, second = Places(CPU), Places(CPU)
    for _ in range(2):
        small_step(first)
        small_step(second)  # cannot record while what the first has recorded is still open
    assert second.ended is None
    small_step(first)
    for _ in range(2):
        small_step(second)
    return first.figures(), second.figures()


def test_executors_record_one_after_the_other() -> None:
    first, second = alone(two_at_once)
    assert first.placed == second.placed == PLACED


def test_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="on a CPU, and this one does on cuda"):
        Places(torch.device("cuda"))


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "SOURCE", tmp_path / "wrong.cpp")
    module.SOURCE.write_text("no program")
    with pytest.raises(ConfigError, match="arena=True compiles an allocator, and that failed"):
        module._compiled()
