"""Real training without a race, and nothing that is put in escapes: two layouts of all."""

from __future__ import annotations

import pytest

from benchmarks.gpu_path.races import LAYOUTS, SABOTAGES, Layout, trial

SOME = {"micro_batches": 4, "schedule": "1f1b", "state_shards": "zero-2"}


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        (Layout(2, 1, 2, SOME), 9),
        (Layout(1, 2, 1, {"micro_batches": 2, "overlap": 2, "sequence_parallel": True}), 1),
    ],
    ids=str,
)
def test_layout(layout: Layout, kinds: int) -> None:
    found = trial(layout)
    assert not found.faults
    assert len(found.caught) == kinds
    assert all(found.caught.values()), found.caught


def test_each_kind_of_sabotage_concerns_several_layouts() -> None:
    concerned = [sum(s.concerns(layout) for layout in LAYOUTS) for s in SABOTAGES.values()]
    assert len(LAYOUTS) >= 40
    assert min(concerned) > 3
    assert sum(concerned) >= 60
