"""Messages on their way."""

from __future__ import annotations

from merakc.ir.program import Action, ActionKind
from merakc.machines.links import Link
from merakc.simulation.links import Links


def test_messages_of_a_pair_share_their_link() -> None:
    links = Links(lambda *_: Link(0.5, 10.0))
    sent = [links.post(0, Action(ActionKind.SEND, 0, j, "x", 1, 20), 0.0) for j in range(2)]
    assert [message.arrives_s for message in sent] == [2.5, 4.5]
    own = links.post(0, Action(ActionKind.SEND, 0, 0, "x", 0, 20), 1.0)
    assert own.arrives_s == 1.0
