"""The tracker of live bytes against what is known to be alive."""

from __future__ import annotations

import torch

from merakc.runtime.live_bytes import LiveBytes


def test_the_peak_counts_what_is_alive_at_once() -> None:
    start = torch.ones(1000)
    with LiveBytes([start]) as tracker:
        one = start * 2
        view = one[10:20]
        del one
        assert tracker.now_bytes == 8000
        del view
        assert tracker.now_bytes == 4000
        two, three = start + 1, start + 2
        del two, three
        start.add_(1)
    assert tracker.peak_bytes == 12000
    assert tracker.now_bytes == 4000
