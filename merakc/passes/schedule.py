"""The order of work: which micro-batch a stage runs when, and the messages around it.

Every stage runs the micro-batches in ascending order, forward and backward. So two ranks that
exchange several values post them in the same order on both sides, which NCCL, having no tags,
depends on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from merakc.errors import ConfigError
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer

Order = tuple[tuple[ActionKind, int], ...]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD


def _gpipe(stage: int, stages: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang et al. 2019, section 2.2)."""
    del stage, stages  # every stage runs the same order
    return tuple((kind, j) for kind in (_F, _B) for j in range(micro_batches))


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> Order:
    """PipeDream-flush (Narayanan et al. 2021, section 2.2.1).

    Stage s of p opens with p - s - 1 forwards, so it holds at most p - s micro-batches.
    """
    warmup = min(micro_batches, stages - stage - 1)
    steady = micro_batches - warmup
    order = [(_F, j) for j in range(warmup)]
    for j in range(steady):
        order += [(_F, warmup + j), (_B, j)]
    order += [(_B, j) for j in range(steady, micro_batches)]
    return tuple(order)


_SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {"gpipe": _gpipe, "1f1b": _one_f_one_b}


def compute_order(schedule: str, stage: int, stages: int, micro_batches: int) -> Order:
    """The forwards and backwards of one stage in one step: pairs of kind and micro-batch.

    Raises `ConfigError` for a schedule of no known name and for fewer than one micro-batch.
    """
    assert 0 <= stage < stages, f"stage {stage} of {stages}"
    if schedule not in _SCHEDULES:
        raise ConfigError(
            f"schedule {schedule!r} is not known; choose one of {', '.join(sorted(_SCHEDULES))}"
        )
    if micro_batches < 1:
        raise ConfigError(f"micro_batches is {micro_batches}; a step needs at least 1")
    return _SCHEDULES[schedule](stage, stages, micro_batches)


def build_programs(
    mesh: Mesh,
    schedule: str,
    micro_batches: int,
    transfers: Sequence[Transfer],
    *,
    forward_only: bool = False,
) -> tuple[Program, ...]:
    """One Program per rank, in rank order. The rank with pp coordinate s runs stage s.

    Ranks that exchange messages share their dp and tp coordinates. `Action.stage` is always the
    stage of the acting rank, that of the receiver in a receive. Transfers may skip stages;
    messages of one micro-batch between two ranks travel in the order of `transfers`. With
    `forward_only` there are no backwards, no gradients and no reduction.

    Raises `ConfigError` as `compute_order` does.
    """
    inbound: dict[int, list[Transfer]] = defaultdict(list)
    outbound: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        assert 0 <= transfer.source_stage < transfer.target_stage < mesh.pp, transfer
        inbound[transfer.target_stage].append(transfer)
        outbound[transfer.source_stage].append(transfer)
    orders = [compute_order(schedule, s, mesh.pp, micro_batches) for s in range(mesh.pp)]
    if forward_only:
        orders = [tuple(item for item in order if item[0] is _F) for order in orders]
    programs = []
    for rank in range(mesh.world_size):
        dp, stage, tp = mesh.coordinates(rank)
        peers = [mesh.rank(dp, other, tp) for other in range(mesh.pp)]
        actions: list[Action] = []
        for kind, j in orders[stage]:
            actions += _with_messages(kind, stage, j, inbound[stage], outbound[stage], peers)
        if not forward_only:
            actions.append(Action(ActionKind.REDUCE, stage))
        programs.append(Program(rank, tuple(actions)))
    return tuple(programs)


def _with_messages(
    kind: ActionKind,
    stage: int,
    micro_batch: int,
    inbound: Sequence[Transfer],
    outbound: Sequence[Transfer],
    peers: Sequence[int],
) -> Iterator[Action]:
    """The receives that a forward or backward waits for, itself, and the sends of its results."""
    is_grad = kind is _B
    arriving, leaving = (outbound, inbound) if is_grad else (inbound, outbound)

    def message(message_kind: ActionKind, transfer: Transfer) -> Action:
        ends = {transfer.source_stage, transfer.target_stage}
        (other,) = ends - {stage}
        return Action(
            message_kind,
            stage,
            micro_batch,
            value=transfer.value,
            peer=peers[other],
            size_bytes=transfer.size_bytes,
            is_grad=is_grad,
        )

    yield from (message(ActionKind.RECV, t) for t in arriving if t.grad or not is_grad)
    yield Action(kind, stage, micro_batch)
    yield from (message(ActionKind.SEND, t) for t in leaving if t.grad or not is_grad)
