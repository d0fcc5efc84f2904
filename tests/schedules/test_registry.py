"""Known schedules by name, and what is refused."""

from __future__ import annotations

import pytest

from merakc.errors import ConfigError
from merakc.ir.program import Action, ActionKind
from merakc.schedules.check import check_schedule
from merakc.schedules.registry import KNOWN, NAMES, make_schedule, stage_ranks


@pytest.mark.parametrize("name", NAMES)
def test_every_action_once_for_all_small_sizes(name: str) -> None:
    """`check_schedule` sees to the order, to deadlocks and to what is missing."""
    halves = {ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}
    backward = halves if KNOWN[name].splits_backward else {ActionKind.BACKWARD}
    for ranks in range(1, 7):
        for m in range(1, 14):
            schedule = make_schedule(name, ranks, m)
            check_schedule(schedule)
            assert (schedule.name, schedule.ranks) == (name, ranks)
            assert schedule.rank_of == stage_ranks(name, ranks)
            stages = range(schedule.stages - (name == "merak"))
            wanted = {
                Action(kind, s, j)
                for kind in (ActionKind.FORWARD, *backward)
                for s in range(schedule.stages)
                for j in range(m)
            }
            if name == "merak":
                wanted |= {Action(ActionKind.RECOMPUTE, s, j) for s in stages for j in range(m)}
            assert {a for order in schedule.orders for a in order} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_stages(name: str) -> None:
    def recomputed(**options: object) -> set[int]:
        schedule = make_schedule(name, 2, 3, **options)  # type: ignore[arg-type]
        check_schedule(schedule)
        found = [a for o in schedule.orders for a in o if a.kind is ActionKind.RECOMPUTE]
        assert len(found) == 3 * len({a.stage for a in found})
        return {a.stage for a in found}

    stages = len(stage_ranks(name, 2))
    merak = name == "merak"
    assert recomputed() == (set(range(stages - 1)) if merak else set())
    assert recomputed(recompute="full") == set(range(stages - merak))
    assert recomputed(recompute={0}) == {0}
    if not merak:
        assert recomputed(recompute="none") == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 4, 8), r"'2f2b' is not known; choose one of gpipe, 1f1b,"),
        (("1f1b", 0, 8), r"0 pipeline ranks"),
        (("1f1b", 4, 0), r"micro_batches is 0"),
    ],
)
def test_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(*arguments)


def test_options_refused() -> None:
    with pytest.raises(ConfigError, match=r"2 virtual stages a rank; it takes 1$"):
        make_schedule("1f1b", 4, 8, virtual_stages=2)
    with pytest.raises(ConfigError, match=r"1 virtual stages a rank; it takes 2 to 64"):
        make_schedule("interleaved-1f1b", 4, 8, virtual_stages=1)
    with pytest.raises(ConfigError, match=r"recompute is 'some'"):
        make_schedule("1f1b", 4, 8, recompute="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"recompute is \(3, 4\); .* there are 4"):
        make_schedule("1f1b", 4, 8, recompute=[3, 4])
    with pytest.raises(ConfigError, match=r"merak hides recomputation"):
        make_schedule("merak", 4, 8, recompute="none")
