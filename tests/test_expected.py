"""What compiled graphs are expected to cost, measured and modelled."""

from __future__ import annotations

import pytest

from merakc.cluster import NOMINAL_CPU
from merakc.expected import expected
from tests.battery.small_models import Words, parallel, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def test_measured_seconds_replace_those_of_the_cluster() -> None:
    steps = parallel(Words, words(0))._own("_steps")
    step = next(iter(steps.compiled.values()))
    modelled, _ = expected(steps, step, NOMINAL_CPU, measured=False)
    again, _ = expected(steps, step, NOMINAL_CPU, measured=False)
    measured, simulation = expected(steps, step, NOMINAL_CPU, measured=True)
    assert modelled == again
    assert measured.step_s == simulation.step_s != modelled.step_s
    assert measured.peak_bytes == modelled.peak_bytes
