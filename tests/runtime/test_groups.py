from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError, MerakError, MismatchError
from merakc.ir.program import Mesh
from merakc.runtime import groups
from merakc.runtime.groups import Groups, agree, from_rank_0, reduce_tensors, together


def members() -> dict[str, list[int] | None]:
    found = Groups(Mesh(dp=2, pp=2, tp=2), dist.get_rank())

    def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    assert found.axis("tp") is found.axis("tp")
    assert found.axis("pp", copy=1) is not found.axis("pp")
    return {
        **{name: ranks(found.axis(name)) for name in ("dp", "pp", "tp", "model")},
        "copy": ranks(found.axis("pp", copy=1)),
        "holders": ranks(found.holders((0, 1))),
        "one holder": ranks(found.holders((1,))),
    }


def test_groups_of_the_mesh() -> None:
    assert run_ranks(8, members)[6] == {
        "dp": [2, 6],
        "pp": [4, 6],
        "tp": [6, 7],
        "model": [4, 5, 6, 7],
        "copy": [4, 6],
        "holders": [4, 6],
        "one holder": None,
    }


def test_one_rank_has_no_groups() -> None:
    alone = Groups(Mesh(), 0)
    assert [alone.axis(name) for name in ("dp", "pp", "tp", "model")] == [None] * 4
    assert together(lambda: 3) == [3]
    assert from_rank_0(lambda: 3) == 3
    agree(lambda: {"a": "b"})


def told(call: Any) -> tuple[type[Exception], str] | object:
    try:
        return call()
    except (MerakError, ValueError) as error:
        return type(error), str(error)


def test_together() -> None:
    assert run_ranks(3, lambda: together(lambda: dist.get_rank() ** 2)) == [[0, 1, 4]] * 3


def fail_on(rank: int, error: Exception) -> Any:
    def make() -> int:
        if dist.get_rank() == rank:
            raise error
        return 1

    return make


def test_a_rank_that_fails() -> None:
    answers = run_ranks(3, told, lambda: together(fail_on(1, ValueError("oh"))))
    others = (MismatchError, "rank 1 could not take part: ValueError: oh")
    assert answers == [others, (ValueError, "oh"), others]


def test_from_rank_0() -> None:
    assert run_ranks(2, lambda: from_rank_0(dist.get_rank)) == [0, 0]
    answers = run_ranks(2, told, lambda: from_rank_0(fail_on(0, ConfigError("no"))))
    assert answers == [(ConfigError, "no")] * 2
    answers = run_ranks(2, told, lambda: from_rank_0(fail_on(0, ValueError("oh"))))
    assert [kind for kind, _ in answers] == [ValueError, MismatchError]
    assert run_ranks(2, told, lambda: from_rank_0(fail_on(1, ValueError("unseen")))) == [1, 1]


def test_agreement_names_the_odd_ranks() -> None:
    def facts() -> dict[str, str]:
        return {"model": "Llama", "size": "8" if dist.get_rank() != 2 else "9"}

    for kind, text in run_ranks(4, told, lambda: agree(facts)):
        assert kind is MismatchError
        assert "the ranks differ in size: rank 2 has '9', the others '8'" in text
    assert run_ranks(2, told, lambda: agree(lambda: {"model": "Llama"})) == [None, None]


def opened(rank_of: tuple[int, ...]) -> tuple[int, int, list[tuple[int, int]]]:
    """The channels and groups of a rank, and the pairs of ranks that it met, in order."""
    made = Groups(Mesh(tp=2, pp=3), dist.get_rank())
    channels = made.channels(rank_of)
    met: list[tuple[int, int]] = []
    send, receive = dist.send, dist.recv

    def sent(word: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        met.append((made.rank, peer))
        send(word, peer, group)

    def received(word: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        met.append((peer, made.rank))
        receive(word, peer, group)

    dist.send, dist.recv = sent, received  # in this rank, which is a process of its own
    made.open_channels(rank_of, torch.device("cpu"))
    return len(channels), len(set(map(id, channels.values()))), met


def test_every_channel_is_opened_between_every_pair() -> None:
    one_way = run_ranks(6, opened, (0, 1, 2))
    assert {found[:2] for found in one_way} == {(2, 2)}
    assert one_way[0][2] == [(0, 2), (0, 4), (2, 0), (4, 0)]  # up, then down; of tp rank 0
    both_ways = run_ranks(6, opened, (0, 1, 2, 2, 1, 0))
    assert {found[:2] for found in both_ways} == {(4, 4)}
    assert len(both_ways[3][2]) == 8


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_reduction_in_buckets(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "BUCKET_BYTES", bucket_bytes)

    def reduce() -> list[torch.Tensor]:
        rank = dist.get_rank()
        tensors = [
            torch.full((3,), float(rank)),
            torch.full((2, 2), 10.0 + rank).T,
            torch.full((), rank, dtype=torch.float64),
            torch.arange(6.0).view(2, 3).T,
        ]
        world = dist.group.WORLD
        assert world is not None
        reduce_tensors(tensors, world)
        reduce_tensors([], world)
        return tensors

    for found in run_ranks(2, reduce):
        wanted = [torch.ones(3), torch.full((2, 2), 21.0), torch.tensor(1.0).double(),
                  2 * torch.arange(6.0).view(2, 3).T]  # fmt: skip
        for own, value in zip(found, wanted, strict=True):
            assert torch.equal(own, value)
