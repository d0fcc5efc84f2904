"""Orders of work with a fault put in at random, and a run that notices whatever would go wrong."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from merakc.errors import MerakError
from merakc.ir.program import Action, ActionKind, Mesh, Program, Transfer
from merakc.ir.schedule import Schedule
from merakc.passes.programs.schedule import build_programs
from merakc.simulation.faults import run_programs, verify_programs

KINDS = [k for k in ActionKind if k.is_compute]


def mutate(actions: Sequence[Action], draw: random.Random) -> tuple[Action, ...]:
    """Some actions dropped, doubled, moved, exchanged or changed."""
    found = list(actions)
    for _ in range(draw.randint(1, 3)):
        if not found:
            break
        here, there = draw.randrange(len(found)), draw.randrange(len(found))
        how = draw.randrange(6)
        if how == 0:
            del found[here]
        elif how == 1:
            found.insert(there, found[here])
        elif how == 2:
            found.insert(there, found.pop(here))
        elif how == 3:
            found[here], found[there] = found[there], found[here]
        elif how == 4:
            found[here] = replace(found[here], micro_batch=found[there].micro_batch)
        elif found[here].kind.is_compute:
            found[here] = replace(found[here], kind=draw.choice(KINDS))
    return tuple(found)


def mutated(
    schedule: Schedule, transfers: Sequence[Transfer], draw: random.Random, head: int | None = None
) -> list[Program]:
    """The Programs of a schedule with a fault in the order or in one of the Programs."""
    pp = schedule.ranks
    rank = draw.randrange(pp)
    if draw.random() < 0.5:
        orders = list(schedule.orders)
        orders[rank] = mutate(orders[rank], draw)
        schedule = replace(schedule, orders=tuple(orders))
        return list(build_programs(Mesh(pp=pp), schedule, transfers, head=head))
    programs = list(build_programs(Mesh(pp=pp), schedule, transfers, head=head))
    programs[rank] = Program(rank, mutate(programs[rank].actions, draw))
    return programs


class Faulty(AssertionError):
    """A run that went wrong."""


class Walk:
    """Runs Programs with names in place of tensors, and frees what the executor frees."""

    def __init__(
        self, programs: Sequence[Program], transfers: Sequence[Transfer], head: int | None = None
    ) -> None:
        self.programs, self.transfers, self.head = programs, transfers, head
        self.waist: set[int] = set()  # the micro-batches that have handed over theirs
        self.values: dict[tuple[int, int], set[str]] = defaultdict(set)  # by stage, micro-batch
        self.outgoing: dict[tuple[int, int, str, bool], int] = {}
        self.again = {(a.stage, a.micro_batch) for p in programs for a in p.actions
                      if a.kind is ActionKind.RECOMPUTE}  # fmt: skip
        self.gradients: dict[tuple[int, int], int] = defaultdict(int)
        self.messages: dict[object, int] = defaultdict(int)

    def run(self, stages: int, micro_batches: int) -> None:
        """Raises `Faulty` where a tensor would be missing, doubled or left over."""
        self.micro_batches = micro_batches
        if run_programs(self.programs, self.post, self.receive, self.compute):
            raise Faulty("a rank waits for ever")
        if self.waist:
            raise Faulty("nothing reads the waist")
        wanted = {(s, j): 1 for s in range(stages) for j in range(micro_batches)}
        if dict(self.gradients) != wanted:
            raise Faulty(f"gradients: {dict(self.gradients)}")
        if any(self.outgoing.values()) or any(self.messages.values()):
            raise Faulty("a value was not sent")

    def take(self, work: tuple[int, int], *names: str, keep: bool = False) -> None:
        """Reads values, and frees them unless they are to be kept."""
        for name in names:
            if name not in self.values[work]:
                raise Faulty(f"{work} reads {name}, which is not there")
            if not keep:
                self.values[work].discard(name)

    def post(self, _rank: int, action: Action) -> None:
        """Sends a value."""
        key = action.stage, action.micro_batch, action.value, action.is_grad
        if not self.outgoing.get(key):
            raise Faulty(f"{action} has nothing to send")
        self.outgoing[key] -= 1
        self.messages[action.message] += 1

    def receive(self, _rank: int, action: Action) -> None:
        """Receives what was sent."""
        if not self.messages[action.message]:
            raise Faulty(f"{action} receives what was not sent")
        self.messages[action.message] -= 1
        grad = f"grad {action.peer_stage}" if action.is_grad else "value"
        self.values[action.stage, action.micro_batch].add(f"{grad} {action.value}")

    def compute(self, _rank: int, action: Action) -> None:
        """Reads what a compute reads, and makes what it makes."""
        stage, work = action.stage, (action.stage, action.micro_batch)
        into = [t for t in self.transfers if t.target_stage == stage]
        out = [t for t in self.transfers if t.source_stage == stage]
        arrived = [f"value {t.value}" for t in into]
        if action.kind is ActionKind.FORWARD:
            self.take(work, *arrived, keep=work in self.again)
            self.values[work].add("checkpoint" if work in self.again else "saved")
            self.send(action, out, is_grad=False)
            if stage == self.head:
                self.waist.add(action.micro_batch)
        elif action.kind is ActionKind.HEAD:
            if stage != self.head or self.waist != set(range(self.micro_batches)):
                raise Faulty(f"{action} reads of micro-batches {self.waist}")
            for j in self.waist:
                self.values[stage, j].add("gradient of the waist")
            self.waist.clear()
        elif action.kind is ActionKind.RECOMPUTE:
            self.take(work, "checkpoint", *arrived)
            self.values[work].add("saved")
        elif action.kind.sends_gradients:
            if stage == self.head:
                self.take(work, "gradient of the waist")
            self.take(work, "saved", *(f"grad {t.target_stage} {t.value}" for t in out if t.grad))
            self.send(action, [t for t in into if t.grad], is_grad=True)
            if action.kind is ActionKind.INPUT_GRAD:
                self.values[work].add("deferred")
            else:
                self.gradients[work] += 1
        elif action.kind is ActionKind.WEIGHT_GRAD:
            self.take(work, "deferred")
            self.gradients[work] += 1

    def send(self, action: Action, transfers: Sequence[Transfer], *, is_grad: bool) -> None:
        """Hands values over to be sent."""
        for transfer in transfers:
            key = action.stage, action.micro_batch, transfer.value, is_grad
            self.outgoing[key] = self.outgoing.get(key, 0) + 1


def refused(programs: Sequence[Program], micro_batches: int, head: int | None = None) -> str:
    """The check's complaint, or nothing."""
    try:
        verify_programs(programs, micro_batches=micro_batches, training=True, head=head)
    except MerakError as error:
        return str(error)
    return ""
