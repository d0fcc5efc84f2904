"""The proof that calls on communicators end: what would hang is refused, with ranks and calls."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.gpu_path.orders import SABOTAGES, Case, complaint
from merakc.analysis.calls import Call, Communicator, Event, Sync, Wait
from merakc.errors import ProgramError
from merakc.simulation.nccl import Connecting, run_calls

CASE = Case("1f1b", pp=4, micro_batches=8, skips=False, dp=2, shards=(1, 2, 2), tp=2)


@pytest.mark.parametrize("connecting", ["eager", "lazy"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "v-min", "zb-h2"])
def test_steps_end(name: str, connecting: Connecting) -> None:
    case = replace(CASE, name=name, skips=True, shards=(2, 2, 4), dp=4, tp=1)
    assert not complaint(case, connecting)
    assert not complaint(replace(CASE, name=name, overlapped=True), connecting)


def test_one_communicator_of_all_pipeline_ranks_hangs_where_it_connects_eagerly() -> None:
    over_axis = replace(CASE, over_axis=True)
    assert not complaint(over_axis, "lazy")
    text = complaint(over_axis, "eager")
    told = r"rank 2 waits for .* on the communicator 'gradients down of ranks 0, 2, 4, 6', in '.*'"
    assert re.match(rf"deadlock, each rank waits for the next: {told}; rank 4 waits", text), text


@pytest.mark.parametrize("kind", SABOTAGES)
def test_sabotage_is_refused(kind: str) -> None:
    for seed in range(3):
        text = SABOTAGES[kind](seed)
        assert len(set(re.findall(r"rank (\d+) ", text))) > 1, (kind, text)
        assert re.search(r", in '[^']+'", text), (kind, text)


def test_orders_of_hosts_matter_while_communicators_connect() -> None:
    one, other = Communicator("a", (0, 1)), Communicator("b", (0, 1))

    def script(*order: Communicator) -> list[Event]:
        calls = [
            Call(c, c.ranks, c.purpose, f"call of {c.purpose}", is_message=True) for c in order
        ]
        return [*calls, *map(Wait, calls), Sync()]

    crossed = {0: script(one, other), 1: script(other, one)}
    run_calls(crossed, "lazy")  # opened before the step
    run_calls(crossed, "eager", opened=lambda _: False)
    with pytest.raises(ProgramError, match=r"rank 0 waits for a on .*; rank 1 waits for b on"):
        run_calls(crossed, "lazy", opened=lambda _: False)


def test_a_call_that_a_rank_does_not_make_is_told() -> None:
    over = Communicator("a", (0, 1))
    call = Call(over, over.ranks, "sum", "reduce 0")
    with pytest.raises(ProgramError, match=r"rank 0 waits for sum .*, and rank 1 ends its step"):
        run_calls({0: [call, Wait(call), Sync()], 1: []})
