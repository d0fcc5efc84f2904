"""What a rank holds, by part."""

from __future__ import annotations

from merakc.ir.costs import StageCost
from merakc.ir.program import Action, ActionKind
from merakc.simulation.held import Held


def test_a_peak_has_what_forwards_save_and_the_action_takes() -> None:
    cost = StageCost(1.0, 1.0, saved_bytes=10, forward_peak_bytes=12, backward_peak_bytes=5)
    held = Held([cost], 100, training=True, recomputed=frozenset())
    for j in range(2):
        held.start(Action(ActionKind.FORWARD, 0, j), 0.0)
    held.start(Action(ActionKind.BACKWARD, 0, 0), 0.0)
    peak = held.peak
    assert (peak.action, peak.in_flight, peak.total_bytes) == ("0B0", 2, 125)
    assert (peak.activations_bytes, peak.transient_bytes, held.live_bytes) == (20, 5, 110)
