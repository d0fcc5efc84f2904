from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from merakc.analysis.calls import Way, ways
from merakc.errors import ConfigError, MerakError, MismatchError
from merakc.ir.program import Mesh, Transfer
from merakc.runtime import groups
from merakc.runtime.groups import Groups, agree, from_rank_0, reduce_tensors, together
from merakc.runtime.streams import stand_in


def members() -> dict[str, list[int] | None]:
    found = Groups(Mesh(dp=2, pp=2, tp=2), dist.get_rank())

    def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
        return None if group is None else dist.get_process_group_ranks(group)

    assert found.axis("tp") is found.axis("tp")
    assert found.axis("pp", "messages") is not found.axis("pp")
    return {
        **{name: ranks(found.axis(name)) for name in ("dp", "pp", "tp", "model")},
        "purpose": ranks(found.axis("pp", "messages")),
        "holders": ranks(found.holders((0, 1))),
        "one holder": ranks(found.holders((1,))),
    }


def test_groups_of_the_mesh() -> None:
    assert run_ranks(8, members)[6] == {
        "dp": [2, 6],
        "pp": [4, 6],
        "tp": [6, 7],
        "model": [4, 5, 6, 7],
        "purpose": [4, 6],
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


class Aside:
    """Stands in for a device's streams: only that there are some matters here."""


def opened() -> tuple[dict[Way, list[int]], list[object]]:
    """The channels of a rank, and whom it met as they were made, in order."""
    met: list[object] = []
    send, receive, reduce = dist.send, dist.recv, dist.all_reduce

    def reduced(word: torch.Tensor, group: dist.ProcessGroup) -> None:
        met.append(dist.get_process_group_ranks(group))
        reduce(word, group=group)

    def sent(word: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        met.append(peer)
        send(word, peer, group)

    def received(word: torch.Tensor, peer: int, group: dist.ProcessGroup) -> None:
        met.append(peer)
        receive(word, peer, group)

    # In this rank, which is a process of its own.
    dist.send, dist.recv, dist.all_reduce = sent, received, reduced
    with stand_in("cpu", lambda _: Aside()):  # type: ignore[arg-type, return-value]
        made = Groups(Mesh(tp=2, pp=3), dist.get_rank())
        made.axis("tp")
        channels = made.channels(
            ways((0, 1, 2), [Transfer("x", s, s + 1, 8, True) for s in (0, 1)])
        )
    assert all(channels.values())
    assert len({id(group) for group in channels.values()}) == len(channels)
    found = {w: dist.get_process_group_ranks(g) for w, g in channels.items() if g is not None}
    return found, met


def test_on_streams_each_way_is_a_group_of_two_that_is_called_as_it_is_made() -> None:
    (first, met), *_, (_, last_met) = run_ranks(6, opened)
    assert first == {(0, 2, False): [0, 2], (2, 0, True): [0, 2]}  # rank 4 is none of its peers
    assert met == [[0, 1], 2, 2]  # an axis, then up and down
    assert last_met == [[4, 5], 3, 3]


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
