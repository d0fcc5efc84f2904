"""The benchmark of searches."""

from __future__ import annotations

import dataclasses

from benchmarks.search_time import CASES, MOST_BYTES, Case, Search, run_case, within


def test_a_search_in_a_process_of_its_own() -> None:
    case = Case("tests.small_source:small", "h100", 8, 16, 0, 600)
    found = run_case(case)
    assert 0 < found.cpu_s < found.wall_s * 1.5
    assert found.step_s > 0
    assert found.plan.startswith("dp ")
    assert within(case, found)


def test_limits() -> None:
    case, good = CASES[0], Search(CASES[0].most_s, 1.0, MOST_BYTES, 1.0, "")
    assert within(case, good)
    assert not within(case, dataclasses.replace(good, wall_s=case.most_s + 0.1))
    assert not within(case, dataclasses.replace(good, peak_bytes=MOST_BYTES + 1))
