from __future__ import annotations

import torch

from benchmarks.gpu_path.clocks import COMPUTING, Clocks


def test_what_is_not_waited_for_is_a_race() -> None:
    clocks, value = Clocks(), torch.zeros(4)
    clocks.run(COMPUTING, "make", writes=[value])
    end = clocks.issue("collective:a", "reduce", [value], [value])  # waits for the computing
    assert not clocks.faults
    clocks.run(COMPUTING, "use", reads=[value])
    assert clocks.faults == {"use (computing) reads what reduce writes": 1}
    clocks.wait(COMPUTING, end)
    clocks.run(COMPUTING, "use again", reads=[value])
    assert clocks.faults.total() == 1


def test_other_bytes_and_reads_are_no_race() -> None:
    clocks, value = Clocks(), torch.zeros(4)
    clocks.issue("message:a", "send", reads=[value[:2]])
    clocks.run(COMPUTING, "use", [value], [value[2:]])
    assert not clocks.faults
    clocks.run(COMPUTING, "write", writes=[value[1:]])
    assert clocks.faults == {"write (computing) writes what send reads": 1}


def test_memory_that_another_stream_still_uses_must_be_held() -> None:
    clocks, value, other = Clocks(), torch.zeros(4), torch.zeros(4)
    clocks.run(COMPUTING, "make", writes=[value, other])
    clocks.issue("message:a", "send", reads=[value])
    end = clocks.issue("message:b", "receive", writes=[other])
    clocks.host |= end  # that it has ended was asked
    del other
    assert not clocks.faults
    del value
    assert clocks.faults == {"let go of while send (message)": 1}
