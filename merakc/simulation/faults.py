"""The check of the Programs of a step, before any rank starts one.

A rank runs its actions in order. A send is posted and forgotten; a receive waits. That makes the
ranks a network of processes that are joined by queues alone, whose result does not depend on who
runs first (Kahn 1974). So each rank is run as far as it can go, and a rank that waits is woken by
the send that it waits for.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from merakc.errors import ProgramError
from merakc.ir.program import Action, ActionKind, Program

GRADIENT_KINDS = (ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)
Channel = tuple[int, int, bool]  # sending rank, receiving rank, whether gradients travel
Work = tuple[int, int]  # stage, micro-batch


def verify_programs(
    programs: Sequence[Program],
    *,
    micro_batches: int = 0,
    training: bool = False,
    head: int | None = None,
) -> None:
    """Checks that the Programs of all ranks run to their end together and miss no work.

    Every send has one receive at its peer and the other way round, in the same order per ordered
    pair of ranks, activations and gradients apart; no ranks wait for each other in a circle, sends
    being buffered. Every stage runs each micro-batch forward once and, unless nothing in the step
    runs backward, backward once after that, whole or as input and weight gradients, with at most
    one recomputation in between; gradients are reduced after the last of them. What a compute reads
    is received before it, what it makes is sent after it, and every micro-batch of a stage
    exchanges the same values.

    What couples the samples of the batch runs on one stage, once on each of its ranks, behind all
    forwards and before all backwards of it: on the stage `head`, or where the Programs have it.

    With `training` every rank is to compute, backward too, and to reduce; there are to be at least
    `micro_batches`. Without, it is taken from the Programs what kind of step this is.

    Raises `ProgramError`, which names the rank and the action.
    """
    ranks = Counter(p.rank for p in programs)
    for rank, count in ranks.items():
        if count > 1:
            raise ProgramError(f"rank {rank} has {count} programs; it needs exactly one")
    _verify_messages(programs)
    _verify_progress(programs)
    _verify_head(programs, head)
    _verify_compute(programs, micro_batches, training)


def trains(programs: Iterable[Program]) -> bool:
    """Whether anything in the step runs backward."""
    kinds = {a.kind for p in programs for a in p.actions}
    return not kinds.isdisjoint((*GRADIENT_KINDS, ActionKind.REDUCE))


def run_programs(
    programs: Sequence[Program],
    post: Callable[[int, Action], None],
    receive: Callable[[int, Action], None],
    compute: Callable[[int, Action], None],
) -> dict[int, Action]:
    """Runs every rank as far as it comes; returns the receive at which each stuck one waits.

    The functions are called with the rank and its action, a receive after its send.
    """
    actions = {p.rank: p.actions for p in programs}
    position = dict.fromkeys(actions, 0)
    posted: Counter[Channel] = Counter()
    waiting: dict[int, Action] = {}
    ready = deque(actions)
    while ready:
        rank = ready.popleft()
        mine = actions[rank]
        while position[rank] < len(mine):
            action = mine[position[rank]]
            if action.kind is ActionKind.RECV:
                channel = action.peer, rank, action.is_grad
                if not posted[channel]:
                    waiting[rank] = action
                    break
                posted[channel] -= 1
                receive(rank, action)
            elif action.kind is ActionKind.SEND:
                post(rank, action)
                posted[rank, action.peer, action.is_grad] += 1
                held_up = waiting.get(action.peer)
                if held_up and (held_up.peer, held_up.is_grad) == (rank, action.is_grad):
                    del waiting[action.peer]
                    ready.append(action.peer)
            else:
                compute(rank, action)
            position[rank] += 1
    return waiting


def _verify_messages(programs: Sequence[Program]) -> None:
    ranks = {p.rank for p in programs}
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    for program in programs:
        for action in program.actions:
            if not action.kind.is_message:
                continue
            if action.peer not in ranks:
                raise ProgramError(
                    f"rank {program.rank}, {action}: rank {action.peer} is no peer; "
                    f"the programs are of ranks {sorted(ranks)}"
                )
            if action.kind is ActionKind.SEND:
                sends[program.rank, action.peer, action.is_grad].append(action)
            else:
                receives[action.peer, program.rank, action.is_grad].append(action)
    for channel in sends.keys() | receives.keys():
        _verify_channel(channel, sends[channel], receives[channel])


def _verify_channel(channel: Channel, sends: Sequence[Action], receives: Sequence[Action]) -> None:
    source, target, _ = channel
    sent = Counter(a.message for a in sends)
    received = Counter(a.message for a in receives)
    for rank, peer, mine, others, twin in (
        (source, target, sends, received, "receive"),
        (target, source, receives, sent, "send"),
    ):
        left = Counter(others)
        for action in mine:
            left[action.message] -= 1
            if left[action.message] < 0:
                raise ProgramError(f"rank {rank}, {action}: rank {peer} has no matching {twin}")
    for k, (send, recv) in enumerate(zip_longest(sends, receives)):
        if send.message != recv.message:
            raise ProgramError(
                f"rank {source}, {send}: message {k} from rank {source} to rank {target}, where "
                f"rank {target} expects '{recv}'; both must post in the same order"
            )
        if send.size_bytes != recv.size_bytes:
            raise ProgramError(
                f"rank {source}, {send}: sends {send.size_bytes} bytes, but rank {target}, "
                f"{recv} expects {recv.size_bytes}"
            )


def _ignore(rank: int, action: Action) -> None:
    del rank, action


def _verify_progress(programs: Sequence[Program]) -> None:
    waiting = run_programs(programs, _ignore, _ignore, _ignore)
    if not waiting:
        return
    # Every receive has its send, so each stuck rank waits for another stuck one.
    raise deadlock({r: (a.peer, f"rank {r} waits at '{a}'") for r, a in waiting.items()})


def deadlock(stuck: Mapping[int, tuple[int, str]]) -> ProgramError:
    """What is wrong where each stuck rank waits for another one, named first; with what is said of
    those that wait in a circle.
    """
    circle = [min(stuck)]
    while (peer := stuck[circle[-1]][0]) not in circle:
        circle.append(peer)
    told = "; ".join(stuck[rank][1] for rank in circle[circle.index(peer) :])
    return ProgramError(f"deadlock, each rank waits for the next: {told}")


def _verify_compute(programs: Sequence[Program], at_least: int, training: bool) -> None:
    actions = [a for p in programs for a in p.actions]
    reduces = training or any(a.kind is ActionKind.REDUCE for a in actions)
    forwards = [a.micro_batch for a in actions if a.kind is ActionKind.FORWARD]
    micro_batches = max(1 + max(forwards, default=-1), at_least)
    idle = next((p.rank for p in programs if not p.actions), -1)
    if training and idle >= 0:
        raise ProgramError(f"rank {idle} has no actions, and every rank is to train a stage")
    training = training or trains(programs)
    for program in programs:
        stages = dict.fromkeys(a.stage for a in program.actions)
        _verify_reductions(program, asked=reduces)
        verify_computes(program.rank, program.actions, stages, micro_batches, training=training)
        _verify_places(program)
        _verify_values(program, micro_batches)


def _verify_reductions(program: Program, *, asked: bool) -> None:
    """Checks that gradients are reduced behind the computes of their stage, if they are `asked`."""
    reduced: set[int] = set()
    for action in program.actions:
        if action.kind.is_compute and action.stage in reduced:
            raise ProgramError(
                f"rank {program.rank}, {action}: stands after the reduction of its stage"
            )
        if action.kind is ActionKind.REDUCE:
            reduced.add(action.stage)
    for stage in dict.fromkeys(a.stage for a in program.actions):
        if asked and stage not in reduced:
            raise ProgramError(f"rank {program.rank}, reduce {stage}: is missing")


def verify_computes(
    rank: int,
    actions: Iterable[Action],
    stages: Iterable[int],
    micro_batches: int,
    *,
    training: bool = True,
) -> None:
    """Checks the computes of one rank, of an order or a Program: each micro-batch of its stages
    runs forward once and, with `training`, backward, and in an order that can be computed.

    Raises `ProgramError`, which names the rank and the action.
    """
    done: dict[Work, set[ActionKind]] = defaultdict(set)
    for action in actions:
        if action.kind.is_compute:
            kinds = done[action.stage, action.micro_batch]
            if fault := _fault(action.kind, kinds):
                raise ProgramError(f"rank {rank}, {action}: {fault}")
            kinds.add(action.kind)
    for stage in stages:
        for j in range(micro_batches):
            if (kind := _missing(done[stage, j], training=training)) is not None:
                raise ProgramError(f"rank {rank}, {Action(kind, stage, j)}: is missing")


def _missing(kinds: set[ActionKind], *, training: bool) -> ActionKind | None:
    """What has to run yet of a micro-batch of which these computes run."""
    if ActionKind.FORWARD not in kinds:
        return ActionKind.FORWARD
    if not training or ActionKind.BACKWARD in kinds or ActionKind.WEIGHT_GRAD in kinds:
        return None
    return ActionKind.WEIGHT_GRAD if ActionKind.INPUT_GRAD in kinds else ActionKind.BACKWARD


def _fault(kind: ActionKind, before: set[ActionKind]) -> str:
    """What is wrong with this compute of a micro-batch after the ones before it, if anything."""
    if kind in before:
        return "runs a second time"
    if kind is not ActionKind.FORWARD and ActionKind.FORWARD not in before:
        return "stands before its forward"
    if kind is ActionKind.RECOMPUTE and not before.isdisjoint(GRADIENT_KINDS):
        return "stands after the backward that would read what it makes"
    if kind is ActionKind.WEIGHT_GRAD and ActionKind.INPUT_GRAD not in before:
        return "stands before its input gradient"
    if kind is ActionKind.INPUT_GRAD and ActionKind.BACKWARD in before:
        return "its gradients are made by its backward already"
    if kind is ActionKind.BACKWARD and ActionKind.INPUT_GRAD in before:
        return "its gradients are made by its input and weight gradients already"
    return ""


def _verify_head(programs: Sequence[Program], stage: int | None) -> None:
    """Checks that all ranks of one stage, and no others, run what couples samples, in its place."""
    for program in programs:
        heads = [k for k, a in enumerate(program.actions) if a.kind is ActionKind.HEAD]
        for k in heads:
            action = program.actions[k]
            stage = action.stage if stage is None else stage
            if fault := _head_fault(program, k, stage, again=k != heads[0]):
                raise ProgramError(f"rank {program.rank}, {action}: {fault}")
    for program in programs:
        kinds = {a.kind for a in program.actions if a.stage == stage}
        if ActionKind.FORWARD in kinds and ActionKind.HEAD not in kinds:
            raise ProgramError(
                f"rank {program.rank}, {Action(ActionKind.HEAD, stage or 0)}: is missing"
            )


def _head_fault(program: Program, position: int, stage: int, *, again: bool) -> str:
    """What is wrong with the place of what couples the samples of the batch, if anything."""
    own = program.actions[position].stage
    if own != stage:
        return f"the samples are coupled by {Action(ActionKind.HEAD, stage)}, once in a step"
    if again:
        return "runs a second time"
    before = {a.kind for a in program.actions[:position] if a.stage == own}
    after = {a.kind for a in program.actions[position:] if a.stage == own}
    if ActionKind.FORWARD in after or ActionKind.FORWARD not in before:
        return "stands before a forward of its stage, whose samples it reads too"
    if not before.isdisjoint(GRADIENT_KINDS):
        return "stands after a backward of its stage, whose gradient it makes"
    return ""


def _verify_places(program: Program) -> None:
    """Checks that messages stand on the right side of the compute that makes or reads them."""
    done: set[tuple[Work, bool]] = set()
    for action in program.actions:
        work = action.stage, action.micro_batch
        if action.kind is ActionKind.FORWARD:
            done.add((work, False))
        elif action.kind.sends_gradients:
            done.add((work, True))
        elif action.kind.is_message:
            computed = (work, action.is_grad) in done
            if action.kind is ActionKind.SEND and not computed:
                fault = "stands before the compute that makes its value"
            elif action.kind is ActionKind.RECV and computed:
                fault = "stands after the compute that reads its value"
            else:
                continue
            raise ProgramError(f"rank {program.rank}, {action}: {fault}")


def _verify_values(program: Program, micro_batches: int) -> None:
    """Checks that what one micro-batch of a stage sends and receives, all others do."""
    found: dict[Action, set[int]] = defaultdict(set)
    for action in program.actions:
        if action.kind.is_message:
            key = Action(
                action.kind, action.stage, 0, action.value, action.peer,
                is_grad=action.is_grad, peer_stage=action.peer_stage,
            )  # fmt: skip
            found[key].add(action.micro_batch)
    for key, seen in found.items():
        missing = set(range(micro_batches)) - seen
        if missing:
            raise ProgramError(
                f"rank {program.rank}, {key}: micro-batch {min(missing)} is missing, which "
                f"exchanges what micro-batch {min(seen)} does"
            )
