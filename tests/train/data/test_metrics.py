"""Metrics that a loop holds count every sample once, whatever the ranks of a replica have seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric, SumMetric

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from tests.battery.small_models import Words, parallel, part, words


def counted(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    seen, mean, own = SumMetric(), MeanMetric(), SumMetric(sync_on_compute=False)
    for metric in (seen, mean, own):
        metric.update(batch["ids"].sum(1))
    model(**batch)
    return [float(metric.compute()) for metric in (seen, mean, own)]


def small() -> Words:
    return Words(blocks=1)


def on_layout(layout: dict[str, int]) -> tuple[list[float], list[float], str]:
    model = parallel(small, words(0), **layout)
    parts = counted(model, part(words(0), model))
    model.read_whole_batches()
    whole = counted(model, words(0))
    other, told = parallel(small, words(0), **layout), ""
    other(**part(words(0), other))
    if model.data_parallel_size > 1:  # elsewhere both have seen all
        with pytest.raises(ConfigError) as refused:
            counted(model, words(0))
        told = str(refused.value)
    del other  # and no longer
    assert counted(model, words(0)) == whole
    return parts, whole, told


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 1, "tp": 2}], ids=str)
def test_every_sample_counts_once(layout: dict[str, int]) -> None:
    ids = words(0)["ids"]
    total, mean = float(ids.sum()), float(ids.sum(1).float().mean())
    for rank, (parts, whole, told) in enumerate(run_ranks(2, on_layout, layout)):
        own = float(ids.chunk(layout["dp"])[rank % layout["dp"]].sum())
        assert parts == [total, pytest.approx(mean), own]
        assert whole == [total, pytest.approx(mean), total]
        assert ("process_group=" in told) == (layout["dp"] > 1)
