"""Computing and communicating side by side."""

from __future__ import annotations

import pytest

from merakc.costs.streams import Streams


def test_what_overlaps_is_hidden() -> None:
    streams = Streams()
    streams.post("a", 1.0)
    streams.compute(0.5)
    streams.post("b", 2.0)
    streams.compute(1.5)
    streams.wait(["a"])
    assert (streams.now_s, streams.exposed_s) == (2.0, 0.0)
    streams.wait(["b"])
    assert (streams.now_s, streams.exposed_s, streams.posted_s) == (3.0, 1.0, 3.0)
    assert streams.ended == [("a", 0.0, 1.0), ("b", 1.0, 3.0)]


def test_collectives_run_in_the_order_of_posting() -> None:
    streams = Streams()
    streams.compute(1.0)
    for key in ("a", "b", "a"):
        streams.post(key, 1.0)
    streams.wait(["b"])
    assert streams.now_s == 3.0
    streams.wait(["a"])
    assert streams.now_s == 4.0
    streams.wait(["a"])  # nothing of it runs
    streams.post("none", 0.0)
    streams.wait()
    assert streams.now_s == 4.0
    assert [key for key, _, _ in streams.ended] == ["a", "b", "a"]


def test_computing_slows_them_down_and_idling_does_not() -> None:
    streams = Streams(overlap=0.25)
    streams.post("a", 1.0)
    streams.compute(2.0)
    streams.idle(0.25)
    streams.wait()
    assert streams.now_s == pytest.approx(2.5)
    assert streams.exposed_s == pytest.approx(0.25)
    stopped = Streams(overlap=0.0)
    stopped.post("a", 1.0)
    stopped.compute(5.0)
    stopped.wait()
    assert (stopped.now_s, stopped.exposed_s) == (6.0, 1.0)


def test_a_collective_ends_within_the_computing() -> None:
    streams = Streams(overlap=0.5)
    streams.compute(1.0)
    streams.post("a", 1.0)
    streams.compute(3.0)
    assert streams.ended == [("a", 1.0, 3.0)]


def test_a_copy_has_a_share_of_its_own() -> None:
    streams = Streams(overlap=0.5)
    streams.post("copy", 1.0, 1.0)
    streams.post("a", 1.0)
    streams.compute(2.0)
    assert streams.ended == [("copy", 0.0, 1.0)]
    assert streams.left_s() == 0.5
    streams.wait()
    assert (streams.now_s, streams.exposed_s) == (2.5, 0.5)


def test_seconds_that_are_left() -> None:
    streams = Streams()
    for key, seconds in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        streams.post(key, seconds)
    assert (streams.left_s(), streams.left_s(["b"]), streams.left_s(["c"])) == (7.0, 3.0, 0.0)
    streams.compute(2.0)
    assert (streams.left_s(), streams.left_s(["b", "c"])) == (5.0, 1.0)
