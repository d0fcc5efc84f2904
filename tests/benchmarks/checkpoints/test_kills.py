"""A run that is killed goes on."""

from __future__ import annotations

import random

from benchmarks.checkpoints import kills
from tests.battery.small_models import warm_up


def test_a_kill() -> None:
    warm_up()
    layout = kills.LAYOUTS[0]
    assert kills.killed(layout, random.Random(0), kills.seconds_of_training(layout))[0] == ""
