"""Ranks that are given other batches or optimizers: seen at every step, on every rank."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.ranks import run_ranks
from merakc.errors import MismatchError
from merakc.ir.program import Mesh
from merakc.runtime.agreement import (
    MAX_BYTES,
    batch_mark,
    common_mark,
    hash_of,
    of_other_size,
    settings_mark,
)
from tests.battery.small_models import Words, build, first_part, parallel, words

MESH = Mesh(2, 2, 2)


def marks(batches: list[torch.Tensor], step: int = 0) -> float:
    """The sum over ranks, each given the batch of its place."""
    return sum(batch_mark(hash_of([x, 1.5], step), MESH, r) for r, x in enumerate(batches))


def test_equal_batches_of_replicas_add_up_to_nothing() -> None:
    first, second = torch.arange(6), torch.arange(6) + 1
    own = [first if MESH.coordinates(r)[0] == 0 else second for r in range(8)]
    assert marks(own) == 0.0
    for rank, other in product(range(8), (first * 2, first.flip(0), first.double())):
        assert marks([*own[:rank], other, *own[rank + 1 :]]) != 0.0
    assert marks([own[(r * 3) % 8] for r in range(8)]) != 0.0  # the same batches, dealt otherwise
    swapped = [second if r in (1, 2) else first for r in range(4)]
    mesh = Mesh(2, 1, 2)
    assert sum(batch_mark(hash_of([x], 0), mesh, r) for r, x in enumerate(swapped)) != 0.0


def test_numbers_that_are_no_tensors_count() -> None:
    x = torch.ones(2)
    assert hash_of([x, 1.5], 0) != hash_of([x, 2.5], 0)
    assert hash_of([x.bfloat16()], 0) == hash_of([x.bfloat16()], 1)


def test_large_tensors_are_sampled_elsewhere_at_every_step() -> None:
    x = torch.zeros(MAX_BYTES)  # four times as many bytes
    y = x.clone()
    y[MAX_BYTES // 2] = 1.0
    seen = [hash_of([x], k) != hash_of([y], k) for k in range(4)]
    assert sum(seen) == 1


def test_settings_are_compared_where_parameters_are_the_same() -> None:
    for pipeline_rank in range(2):
        own = [r for r in range(8) if MESH.coordinates(r)[1] == pipeline_rank]
        assert sum(settings_mark(ord("a"), MESH, r) for r in own) == 0.0
        for odd in own:
            assert sum(settings_mark(ord("ab"[r == odd]), MESH, r) for r in own) != 0.0


def test_what_is_the_same_for_all_is_so_on_every_rank() -> None:
    x = torch.arange(6)
    assert sum(common_mark(hash_of([x], 0), MESH, r) for r in range(8)) == 0.0
    for odd in range(8):
        assert sum(common_mark(hash_of([x + (r == odd)], 0), MESH, r) for r in range(8)) != 0.0


@pytest.mark.parametrize(
    ("shapes", "beside", "unlike"),
    [
        ([(1, 7), (1, 7)], [{("ids", 1): 9}] * 2, None),
        ([(1, 7), (1, 5)], [{("ids", 1): 7}, {("ids", 1): 5}], None),  # positions of tokens
        ([(1, 7), (1, 5)], [{("ids", 1): 7}, {("ids", 1): 7}], 1),
        ([(5, 5), (3, 5)], [{("ids", 1): 5}, {("ids", 1): 5}], 1),  # samples
        ([(5,), (5,), (5, 1)], [{}] * 3, 2),
    ],
)
def test_what_is_the_same_for_all_is_as_long_as_a_ranks_texts_at_most(
    shapes: list[tuple[int, ...]], beside: list[dict[tuple[str, int], int]], unlike: int | None
) -> None:
    assert of_other_size(shapes, beside) == unlike


def second_step(layout: dict[str, int]) -> str:
    """The error of a second training step, behind an evaluation, for which rank 1 has another
    batch of the same shape.
    """
    model = parallel(Words, words(0), micro_batches=2, **layout)
    with torch.no_grad():
        model.eval()(**words(0))
    model.train()(**words(0))["loss"].backward()
    with pytest.raises(MismatchError) as caught:
        model(**words(int(model.rank == 1)))
    model(**words(2))["loss"].backward()  # the ranks are still together
    return str(caught.value)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_every_step_is_looked_at(layout: dict[str, int]) -> None:
    world = layout.get("dp", 1) * 2
    found = run_ranks(world, second_step, layout)
    named = [text for text in found if "ranks [1] were given another batch than rank 0" in text]
    assert len(named) == 2
    assert all("another data-parallel replica" in text for text in found if text not in named)


def trained(layout: dict[str, int], options: list[dict[str, Any]]) -> str:
    """The error of the second of two training steps, each rank with its own optimizer."""
    model = parallel(Words, words(0), micro_batches=2, **layout)
    batch = first_part(words(0), layout.get("dp", 1))
    other = nn.Linear(1, 1)  # another model's optimizer is nobody's business
    for rate, module in ((0.1 * model.rank, other), (None, model)):
        own = {"lr": rate} if rate is not None else options[model.rank]
        optimizer = torch.optim.AdamW(module.parameters(), **own)
        if module is model:
            model(**batch)["loss"].backward()
        optimizer.step()
    try:
        model(**batch)
    except MismatchError as error:
        with pytest.raises(MismatchError, match="of different steps since rank 1 trains with"):
            model(**batch)
        model.load_state_dict(build(Words).state_dict())
        model(**batch)
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_optimizers_that_differ(layout: dict[str, int]) -> None:
    rates: list[dict[str, Any]] = [{"lr": 0.01}, {"lr": 0.02}]
    for text in run_ranks(2, trained, layout, rates):
        assert "rank 1 trains with other settings than rank 0" in text
        assert "lr=0.02" in text
        assert "lr=0.01" in text
    same: list[dict[str, Any]] = [{"lr": 0.01, "foreach": k == 0} for k in range(2)]
    assert run_ranks(2, trained, layout, same) == ["", ""]


def frozen() -> str:
    model = parallel(Words, words(0), pp=2)
    for k, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(k != 3 or model.rank == 0)
    try:
        model(**words(0))["loss"].backward()
    except MismatchError as error:
        return str(error)
    return ""


def test_what_is_frozen_is_so_on_all_ranks() -> None:
    for text in run_ranks(2, frozen):
        assert "rank 1 trains with other settings than rank 0: no optimizer, 26 trained" in text


def warned(runs: list[tuple[int, ...]]) -> list[list[str]]:
    """What is warned of in steps of batches with these seeds; the negative ones' differ over dp."""
    found = []
    for seeds in runs:
        model = parallel(Words, words(0), dp=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for seed in seeds:
                batch = words(seed) if seed > 0 else words(1000 * model.rank - seed)
                with torch.no_grad():
                    model.eval()(**words(abs(seed)))  # the same for all ranks, as many do
                model.train()(**batch)["loss"].backward()
        found.append([str(w.message) for w in told if "the same batches" in str(w.message)])
    return found


def test_ranks_that_train_on_the_same_samples_are_warned_once() -> None:
    runs = [(1, 2, 3, 4, 5), (1, 1, 1, 1), (1, 2, -3, 4, 5, -6)]
    found = run_ranks(2, warned, runs)
    assert [len(x) for x in found[0]] == [1, 0, 0]
    assert [len(x) for x in found[1]] == [0, 0, 0]
    assert "merakc.dataloader(data, model, batch_size) deals them" in found[0][0][0]
