"""Which reading of a batch is taken, by recordings of small models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from merakc.batches.dims import parse_batch_dims
from merakc.batches.split import batch_size_of
from merakc.errors import ConfigError, OtherSizeError, RecordError
from merakc.ir.batches import BatchDims, BatchLayout
from merakc.lowering.find_samples import MOST_TRIED, Fit, check_lists, find_samples, fit_of
from merakc.lowering.recording import record_part
from merakc.passes.batches.proof.certificate import CertificateError
from merakc.passes.batches.recorded import BatchRecording
from tests.batch_models import TimeFirst


class Elementwise(nn.Module):
    """A loss to which no dim means anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


class Against(nn.Module):
    """Every sample against every other, behind one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = self.layer(x)
        return ((z @ z.T).softmax(-1).diagonal().log() * w.sum()).mean()


def record(
    model: nn.Module, batch: dict[str, torch.Tensor], readings: list[BatchDims], dp: int, k: int
) -> BatchRecording:
    layout = BatchLayout((batch_size_of((), batch, readings[k]),) * dp, 2)
    return record_part(model, (), batch, layout, torch.device("cpu"), dims=readings[k])


def recorder(
    model: nn.Module, batch: dict[str, torch.Tensor], *given: dict[str, int | None], dp: int = 1
) -> tuple[range, Callable[[int], BatchRecording], list[int]]:
    """The numbers of readings, what records one, and a list of those that were recorded."""
    seen: list[int] = []
    own = partial(record, model, batch, [parse_batch_dims(dims) for dims in given], dp)

    def noted(k: int) -> BatchRecording:
        seen.append(k)
        return own(k)

    return range(len(given)), noted, seen


TIMES = {"x": torch.zeros(4, 8, 6), "y": torch.zeros(8, dtype=torch.long)}


def test_the_first_reading_is_taken_without_another_recording() -> None:
    readings, own, seen = recorder(TimeFirst(), TIMES, {"x": 1}, {"x": 0, "y": None})
    assert find_samples(readings, own) == 0
    assert seen == [0]


def test_a_reading_that_fits_is_found() -> None:
    readings, own, seen = recorder(
        TimeFirst(), TIMES, {"x": 0, "y": None}, {"x": None}, {"x": 1, "y": 0}, {"x": 1}
    )
    assert find_samples(readings, own) == 2
    assert seen == [0, 1, 2]


def test_where_none_fits_the_first_is_taken() -> None:
    readings, own, seen = recorder(TimeFirst(), TIMES, *[{"x": 0, "y": None}] * (MOST_TRIED + 3))
    assert find_samples(readings, own) == 0
    assert len(seen) == MOST_TRIED + 1
    with pytest.raises(RecordError, match=r"batch_dims=\{'x': 0, 'y': None\}"):
        own(0)


def test_of_readings_that_fail_one_is_told_that_takes_other_numbers_of_samples() -> None:
    def record(reading: int) -> BatchRecording:
        raise (RecordError if reading == 2 else OtherSizeError)("it fails")

    assert find_samples(range(4), record) == 2
    assert find_samples(range(2), record) == 0


def test_ranks_have_to_know_how_their_batches_join() -> None:
    """In one replica all readings that fit give one step."""
    batch = {"x": torch.zeros(4, 4, 3), "w": torch.zeros(4)}
    given = [{"x": None, "w": 0}, {"x": 0, "w": None}, {"x": 1, "w": None}]

    class Some(Elementwise):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            assert w.shape == (4,), "a vector for all"
            return super().forward(x)

    readings, own, _ = recorder(Some(), batch, *given)
    assert find_samples(readings, own) == 1
    readings, own, _ = recorder(Some(), batch, *given, dp=2)
    with pytest.raises(ConfigError, match=r"\{'x': 0, 'w': None\} or batch_dims=\{'x': 1, 'w'"):
        find_samples(readings, own)


def test_samples_that_meet_early_are_not_read_along_another_dim_by_several_ranks() -> None:
    """Each position fits by itself, and the ranks' batches may still be joined by samples."""

    class Mixed(Elementwise):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x).tanh()
            return super().forward(self.layer(x + x.roll(1, 0)).tanh())

    given = {"x": 0}, {"x": 1}
    readings, own, _ = recorder(Mixed(), {"x": torch.zeros(8, 4, 3)}, *given)
    assert find_samples(readings, own) == 1
    readings, own, seen = recorder(Mixed(), {"x": torch.zeros(8, 4, 3)}, *given, dp=2)
    assert find_samples(readings, own, joined=True) == 0
    assert seen == [0]
    assert fit_of(own(0)) is Fit.REFUSED


def test_a_forward_that_reads_no_samples_fits_no_reading() -> None:
    """Every part of it would be the whole batch, of which each dp rank has another."""

    class OneByOne(Elementwise):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            losses = [super(OneByOne, self).forward(row) for row in x]
            return torch.stack(losses).mean()

    batch = {"x": torch.zeros(8, 3), "w": torch.zeros(8)}
    readings, own, seen = recorder(OneByOne(), batch, {"x": 0, "w": 0}, {"x": None, "w": 0})
    assert find_samples(readings, own) == 0
    assert seen == [0, 1]


def test_samples_that_meet() -> None:
    batch = {"x": torch.zeros(8, 6), "w": torch.zeros(5)}
    readings, own, _ = recorder(Against(), batch, {"x": 0, "w": None}, {"x": 1, "w": None})
    assert fit_of(own(0)) is Fit.COUPLED
    assert find_samples(readings, own) == 0


def test_a_rule_that_is_wrong_is_no_sign_of_another_reading() -> None:
    def record(reading: int) -> BatchRecording:
        assert reading == 0
        raise CertificateError("a rule is wrong")

    with pytest.raises(CertificateError):
        find_samples(range(2), record)


def test_one_part_that_draws_is_read_as_several_are() -> None:
    class Dropped(TimeFirst):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(torch.nn.functional.dropout(x), y)
            return loss

    given = [parse_batch_dims(d) for d in ({"x": 0, "y": None}, {"x": 1, "y": 0})]

    def one_part(k: int) -> BatchRecording:
        layout = BatchLayout((batch_size_of((), TIMES, given[k]),), 1)
        return record_part(Dropped(), (), TIMES, layout, torch.device("cpu"), dims=given[k])

    assert find_samples(range(2), one_part) == 1


class Longest(nn.Module):
    """The mean over a list of the largest element of each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: list[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(each).max() for each in x]).mean()


@pytest.mark.parametrize("dims", [{}, {"y": 0}, {"x.0": 0}])
def test_ranks_have_to_know_how_their_lists_join(dims: dict[str, int | None]) -> None:
    """As one list of more tensors, or as tensors of more rows."""
    batch, given = {"x": [torch.zeros(4, 3)] * 2, "y": torch.zeros(4)}, parse_batch_dims(dims)

    def own(sizes: tuple[int, ...], said: BatchDims) -> BatchRecording:
        layout = BatchLayout(sizes, 2)
        return record_part(Longest(), (), batch, layout, torch.device("cpu"), dims=said)

    check_lists(own((4,), given), given)
    with pytest.raises(ConfigError, match=r"'x\.[01]' .*batch_dims=\{'x\.\*': 0\}"):
        check_lists(own((4, 4), given), given)
    for said in (parse_batch_dims({"x.*": 0}), parse_batch_dims({"x.*": None})):
        check_lists(own((4, 4), said), said)
