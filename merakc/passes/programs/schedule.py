"""From an order of work to Programs: the messages around the compute of every rank.

NCCL has no tags: what one rank sends to another over one channel arrives in the order of the
calls, so both ends must post in that order, whatever the order of their own work. A channel is an
ordered pair of ranks, once for activations and once for gradients. The sender's order rules: it
sends what a compute has made right after it. The receiver takes, before a compute, what that reads
and whatever came over the same channel before. It waits for nothing longer through that, since
what was sent before has arrived before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.ir.schedule import Schedule

Channel = tuple[int, bool]  # into a rank: the sender, and whether gradients travel


def build_programs(
    mesh: Mesh,
    schedule: Schedule,
    transfers: Sequence[Transfer],
    *,
    forward_only: bool = False,
    ranks: Iterable[int] | None = None,
    head: int | None = None,
) -> tuple[Program, ...]:
    """One Program per rank, in rank order, of all or of these; a rank runs the stages of its pp
    coordinate.

    Ranks that exchange messages share their dp and tp coordinates. Transfers may skip stages;
    those between two stages of one rank are messages of the rank to itself. With `forward_only`
    there are no backwards, no gradients and no reduction. What couples the samples runs behind the
    last forward of the stage `head`.

    Raises `ConfigError` where the schedule is for another number of ranks. Whether the Programs
    run to their end is for `verify_programs` to say.
    """
    if schedule.ranks != mesh.pp:
        raise ConfigError(
            f"schedule '{schedule.name}' is for {count_of(schedule.ranks, 'pipeline rank')}, the "
            f"mesh has {mesh.pp}; give an order for each"
        )
    if forward_only:
        orders = [[a for a in o if a.kind is ActionKind.FORWARD] for o in schedule.orders]
        schedule = replace(schedule, orders=tuple(map(tuple, orders)))
    if head is not None:
        orders = [_with_head(order, head) for order in schedule.orders]
        schedule = replace(schedule, orders=tuple(map(tuple, orders)))
    routes = _Routes(schedule.rank_of, transfers)
    arriving = _arriving(schedule, routes)
    lists = []
    for rank, order in enumerate(schedule.orders):
        actions = _with_messages(order, arriving[rank], routes)
        if not forward_only:
            stages = (s for s, holder in enumerate(schedule.rank_of) if holder == rank)
            actions += [Action(ActionKind.REDUCE, stage) for stage in stages]
        lists.append(actions)
    wanted = range(mesh.world_size) if ranks is None else ranks
    return tuple(_placed(rank, mesh, lists) for rank in wanted)


def _with_head(order: Sequence[Action], stage: int) -> list[Action]:
    """A rank's compute with what follows the last forward of a stage, if it runs that."""
    found = list(order)
    forwards = [k for k, a in enumerate(order) if (a.kind, a.stage) == (ActionKind.FORWARD, stage)]
    if forwards:
        found.insert(forwards[-1] + 1, Action(ActionKind.HEAD, stage))
    return found


def _placed(rank: int, mesh: Mesh, lists: Sequence[Sequence[Action]]) -> Program:
    """The Program of one rank of the mesh, its peers in its own dp and tp."""
    dp, pipeline_rank, tp = mesh.coordinates(rank)
    return Program(
        rank,
        tuple(
            replace(a, peer=mesh.rank(dp, a.peer, tp)) if a.kind.is_message else a
            for a in lists[pipeline_rank]
        ),
    )


class _Routes:
    """The messages into and out of every stage; peers are pipeline ranks here."""

    def __init__(self, rank_of: Sequence[int], transfers: Sequence[Transfer]) -> None:
        self.rank_of = rank_of
        self.inbound: dict[int, list[Transfer]] = defaultdict(list)
        self.outbound: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            assert 0 <= transfer.source_stage < transfer.target_stage < len(rank_of), transfer
            self.inbound[transfer.target_stage].append(transfer)
            self.outbound[transfer.source_stage].append(transfer)

    def sends(self, action: Action) -> Iterator[Action]:
        """What a compute sends when it has ended."""
        if action.kind is ActionKind.FORWARD:
            yield from self._messages(ActionKind.SEND, action, is_grad=False)
        elif action.kind.sends_gradients:
            yield from self._messages(ActionKind.SEND, action, is_grad=True)

    def receives(self, action: Action) -> Iterator[Action]:
        """What a compute reads."""
        if action.kind is ActionKind.FORWARD:
            yield from self._messages(ActionKind.RECV, action, is_grad=False)
        elif action.kind.sends_gradients:
            yield from self._messages(ActionKind.RECV, action, is_grad=True)

    def _messages(self, kind: ActionKind, action: Action, *, is_grad: bool) -> Iterator[Action]:
        downstream = (kind is ActionKind.SEND) is not is_grad  # the peer stage is a later one
        for transfer in (self.outbound if downstream else self.inbound)[action.stage]:
            if is_grad and not transfer.grad:
                continue
            other = transfer.target_stage if downstream else transfer.source_stage
            yield Action(
                kind,
                action.stage,
                action.micro_batch,
                value=transfer.value,
                peer=self.rank_of[other],
                size_bytes=transfer.size_bytes,
                is_grad=is_grad,
                peer_stage=other,
            )


def _with_messages(
    order: Sequence[Action], arriving: Mapping[Channel, Sequence[Action]], routes: _Routes
) -> list[Action]:
    """A rank's compute, with the receives before and the sends behind each action."""
    turns = {
        channel: {receive.message: k for k, receive in enumerate(receives)}
        for channel, receives in arriving.items()
    }
    taken = dict.fromkeys(arriving, 0)
    actions: list[Action] = []
    for action in order:
        for receive in routes.receives(action):
            channel = receive.peer, receive.is_grad
            turn = turns.get(channel, {}).get(receive.message)
            if turn is None:  # nobody sends it: the check of the Programs says so
                actions.append(receive)
            elif turn >= taken[channel]:
                actions += arriving[channel][taken[channel] : turn + 1]
                taken[channel] = turn + 1
        actions.append(action)
        actions += routes.sends(action)
    return actions


def _arriving(schedule: Schedule, routes: _Routes) -> list[dict[Channel, list[Action]]]:
    """For each rank the receives of all that is sent to it, per channel in the sender's order."""
    found: list[dict[Channel, list[Action]]] = [defaultdict(list) for _ in schedule.orders]
    for sender, order in enumerate(schedule.orders):
        for action in order:
            for send in routes.sends(action):
                receive = replace(
                    send,
                    kind=ActionKind.RECV,
                    stage=send.peer_stage,
                    peer=sender,
                    peer_stage=send.stage,
                )
                found[send.peer][sender, send.is_grad].append(receive)
    return found
