"""The process group that can leave collectives out, against gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.peers.probe import NAME, Tape, install
from benchmarks.ranks import run_ranks
from merakc.kernels.collectives import gather_into

SIZE = 4


def _collectives(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The results of each collective, on numbers that tell ranks apart."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.arange(SIZE, dtype=torch.float32) + 10 * rank
    gathered, listed = torch.zeros(ranks * SIZE), [torch.zeros(SIZE) for _ in range(ranks)]
    scattered, exchanged = torch.zeros(SIZE // ranks), torch.zeros(SIZE)
    shared, summed = own.clone(), own.clone()
    dist.all_gather_single(gathered, own, group=group)
    dist.all_gather(listed, own, group=group)
    dist.reduce_scatter_single(scattered, own, group=group)
    dist.all_to_all_single(exchanged, own, group=group)
    dist.broadcast(shared, 0, group=group)
    dist.all_reduce(summed, group=group, async_op=True).wait()
    dist.barrier(group=group)
    return [gathered, *listed, scattered, exchanged, shared, summed]


def _run() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], int, int]:
    tape = Tape()
    install(tape)
    group = dist.new_group(backend=NAME)
    plain, passed = _collectives(None), _collectives(group)
    tape.recording = True
    _collectives(group)
    tape.recording = False
    calls, handed_bytes = len(tape.calls), tape.handed_bytes
    tape.replay()
    assert len(tape.calls) == calls
    tape.muted = True
    if dist.get_rank() == 0:  # alone: nothing is waited for
        return plain, passed, _collectives(group), calls, handed_bytes
    return plain, passed, [], calls, handed_bytes


def test_collectives_pass_and_are_left_out() -> None:
    (plain, passed, muted, calls, handed_bytes), (plain_1, passed_1, *_) = run_ranks(2, _run)
    for found, expected in zip([*passed, *passed_1], [*plain, *plain_1], strict=True):
        assert torch.equal(found, expected)
    own = torch.arange(SIZE, dtype=torch.float32)
    alone = [own.repeat(2), own, own, own[:2], own, own, own]
    for found, expected in zip(muted, alone, strict=True):
        assert torch.equal(found, expected)
    assert calls == 7
    # Each tensor that a call is given counts: 12 + 12 + 6 + 8 + 4 + 4 elements.
    assert handed_bytes == 4 * 46


def _gather_in_place() -> torch.Tensor:
    tape = Tape(muted=True)
    install(tape)
    group = dist.new_group(backend=NAME)
    whole = torch.arange(4.0)
    dist.all_gather_single(whole, whole[:2], group=group)
    return whole


def _gathered_by_merakc() -> list[float]:
    install(Tape(muted=True))
    whole = torch.full((4,), float("nan"))
    own = torch.arange(2.0) + dist.get_rank()
    gather_into(whole, own, dist.new_group(backend=NAME)).wait()
    return whole.tolist()


def test_what_is_gathered_is_like_the_own_part() -> None:
    wanted = [[0.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 2.0]]
    assert run_ranks(2, _gathered_by_merakc) == wanted


def test_a_view_of_the_output_is_gathered() -> None:
    assert run_ranks(2, _gather_in_place)[0].tolist() == [0.0, 1.0, 0.0, 1.0]
