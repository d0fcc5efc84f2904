from __future__ import annotations

from benchmarks.gpu_path.orders import Case
from merakc.analysis.calls import (
    Call,
    Event,
    Join,
    Sync,
    Wait,
    purpose,
    receives_ahead,
    step_calls,
    ways,
)
from merakc.ir.program import Transfer


def test_ways() -> None:
    transfers = [Transfer("x", s, s + 1, 8, True) for s in range(3)] + [
        Transfer("m", 0, 3, 8, False)
    ]
    assert ways((0, 1, 2, 3), transfers[:1]) == ((0, 1, False), (1, 0, True))
    found = ways((0, 1, 1, 0), transfers)  # two stages a rank, the last where the first is
    assert found == ((0, 1, False), (0, 1, True), (1, 0, False), (1, 0, True))
    assert [purpose(way) for way in found] == [
        "activations up", "gradients up", "activations down", "gradients down",
    ]  # fmt: skip


def test_receives_are_posted_once_and_two_computes_ahead() -> None:
    case = Case("1f1b", 2, 3, skips=False)
    schedule = case.schedule()
    first, _ = case.programs(schedule, case.wiring(schedule))
    names = [*map(str, first.actions)]
    assert names[:7] == [
        "0F0", "send 0F0 x -> 1", "0F1", "send 0F1 x -> 1", "recv 0B0 x <- 1", "0B0", "0F2",
    ]  # fmt: skip
    ahead = receives_ahead(first)
    assert [k for of in ahead for k in of] == [*range(len(names))]
    when = {names[k]: names[at] for at, of in enumerate(ahead) for k in of}
    assert when["recv 0B0 x <- 1"] == "send 0F0 x -> 1"
    assert (when["recv 0B1 x <- 1"], when["recv 0B2 x <- 1"]) == ("0F2", "send 0F2 x -> 1")


def lines(events: tuple[Event, ...]) -> list[str]:
    """Events in few words, without what messages say."""
    found = []
    for event in events:
        match event:
            case Call():
                found.append(f"{event.stream}: {event.what}")
            case Wait():
                found.append(f"{event.stream} waits for {event.call.what}")
            case Join():
                found.append(f"{event.stream} joins {event.other}")
            case Sync():
                pass
    return found


def test_a_step_of_one_rank() -> None:
    case = Case("gpipe", 1, 1, skips=False, dp=4, shards=(2, 2, 4))
    schedule = case.schedule()
    wiring = case.wiring(schedule)
    found = lines(step_calls(case.programs(schedule, wiring)[0], wiring))
    assert found[:7] == [
        "computing: refresh 0:0 (refresh)",
        "computing: refresh 0:1 (refresh)",
        "computing: refresh 0+0:0 (refresh)",
        "computing waits for refresh 0+0:0 (refresh)",
        "computing: gather 0+0:0 (gather)",
        "computing waits for gather 0+0:0 (gather)",
        "computing waits for refresh 0:0 (refresh)",
    ]
    assert found[-11:] == [
        "reductions waits for reduce 0:0 (gather)",
        "reductions: reduce 0:0 (refresh)",
        "reductions waits for reduce 0:0 (refresh)",
        "computing waits for reduce 0:1 (refresh)",  # the last but one
        "reductions joins computing",
        "reductions: reduce 0+0:0 (gather)",
        "reductions waits for reduce 0+0:0 (gather)",
        "reductions: reduce 0+0:0 (refresh)",
        "reductions waits for reduce 0+0:0 (refresh)",
        "computing waits for reduce 0:0 (refresh)",
        "computing waits for reduce 0+0:0 (refresh)",
    ]
