"""Messages between ranks on their way: those of an ordered pair of ranks share one link."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from merakc.ir.program import Action
from merakc.machines.links import Link
from merakc.simulation.faults import Channel


@dataclass(frozen=True, slots=True)
class Message:
    """A message, from when it was sent to when it arrives, in seconds since the start of the step.

    For `exposed_s` of these its receiver waits.
    """

    sender: int
    receiver: int
    size_bytes: int
    sent_s: float
    arrives_s: float
    exposed_s: float = 0.0


class Links:
    """The links between all ranks, by `link_of` two of them.

    A message takes size / `bytes_per_s` of its link, after the one before, and arrives `latency_s`
    later; one of a rank to itself takes no time.
    """

    def __init__(self, link_of: Callable[[int, int], Link]) -> None:
        self.link_of = cache(link_of)
        self.free_s: dict[tuple[int, int], float] = {}
        self.under_way: dict[Channel, deque[Message]] = defaultdict(deque)

    def post(self, rank: int, action: Action, now_s: float) -> Message:
        """Sends a message."""
        arrives_s, pair = now_s, (rank, action.peer)
        if action.peer != rank:
            start_s, link = max(now_s, self.free_s.get(pair, 0.0)), self.link_of(*pair)
            self.free_s[pair] = start_s + action.size_bytes / link.bytes_per_s
            arrives_s = self.free_s[pair] + link.latency_s
        message = Message(*pair, action.size_bytes, now_s, arrives_s)
        self.under_way[rank, action.peer, action.is_grad].append(message)
        return message

    def coming(self, rank: int, action: Action) -> deque[Message]:
        """What has been sent of a receive's channel, in the order of posting."""
        return self.under_way[action.peer, rank, action.is_grad]
