"""Messages of one step: receives that are posted ahead, sends that nobody waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from merakc.analysis.calls import receives_ahead
from merakc.errors import StuckError
from merakc.ir.graph import TensorSpec
from merakc.ir.program import Action, ActionKind, Program
from merakc.runtime.groups import Channels
from merakc.runtime.streams import streams_of


class Messages:
    """The messages of one rank in one step.

    `specs` gives the shape of every value by (stage, value name). Waits longer than `timeout_s`
    raise `StuckError` where the host waits itself; on devices with streams a wait only orders
    these, and the watchdog of the process group sees to it.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[tuple[int, str], TensorSpec],
        device: torch.device,
        channels: Channels,
        timeout_s: float,
    ) -> None:
        self.program, self.specs, self.device = program, specs, device
        self.channels, self.timeout_s = channels, timeout_s
        self.tags, self.ahead = message_tags(program), receives_ahead(program)
        self.receives: dict[int, tuple[dist.Work, torch.Tensor]] = {}
        self.blocks = streams_of(device) is None
        self.sends: _WaitedSends | _PolledSends = _WaitedSends() if self.blocks else _PolledSends()

    def post_receives(self, now: int) -> None:
        """Posts the receives that are to be under way at position `now`; lets go of what was sent
        and has left.
        """
        self.sends.settle()
        for position in self.ahead[now]:
            action = self.program.actions[position]
            if action.kind is not ActionKind.RECV or action.peer == self.program.rank:
                continue
            spec = self.specs[action.stage, action.value]
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            try:
                group, tag = self._group(action), self.tags[position]
                work = dist.irecv(buffer, action.peer, group, tag)
            except RuntimeError as error:
                raise self._stuck(action, error) from error
            assert work is not None
            self.receives[position] = (work, buffer)

    def receive(self, position: int, action: Action) -> torch.Tensor:
        """Waits for the message of a receive."""
        work, buffer = self.receives.pop(position)
        try:
            if self.blocks:
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                work.wait()
        except RuntimeError as error:
            raise self._stuck(action, error) from error
        return buffer

    def send(self, position: int, action: Action, value: torch.Tensor) -> None:
        """Starts a message. The value must not be written any more."""
        try:
            work = dist.isend(value, action.peer, self._group(action), self.tags[position])
        except RuntimeError as error:
            raise self._stuck(action, error) from error
        assert work is not None
        self.sends.add(work, value, action)

    def finish(self) -> None:
        """Waits until everything that was sent is there."""
        self.sends.close()
        left = self.sends.finish(self.timeout_s)
        if left is not None:
            action, error = left
            raise self._stuck(action, error) from error

    def close(self) -> None:
        """Nothing more is sent, after a failure too."""
        self.sends.close()

    def _group(self, action: Action) -> dist.ProcessGroup | None:
        ends = self.program.rank, action.peer
        ends = ends if action.kind is ActionKind.SEND else ends[::-1]
        return self.channels.get((*ends, action.is_grad))

    def _stuck(self, action: Action, error: RuntimeError | None) -> StuckError:
        place = next((k for k, a in enumerate(self.program.actions) if a is action), -1)
        computes = [a for a in self.program.actions[: place + 1] if a.kind.is_compute]
        done = f"after '{computes[-1]}'" if computes else "before any compute"
        fault = "did not send it" if action.kind is ActionKind.RECV else "did not take it"
        text = f" ({error})" if error else ""
        return StuckError(
            f"rank {self.program.rank} waited at '{action}', action {place} of "
            f"{len(self.program.actions)}, {done}: rank {action.peer} {fault} within "
            f"{self.timeout_s:g} s, or has gone{text}. See what rank {action.peer} reports; where "
            "it is only slow, raise timeout_s of auto_parallel"
        )


class _PolledSends:
    """Sends whose end can be asked for."""

    def __init__(self) -> None:
        self.left: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, work: dist.Work, value: torch.Tensor, _action: Action) -> None:
        self.left.append((work, value))

    def settle(self) -> None:
        while self.left and self.left[0][0].is_completed():
            self.left.popleft()

    def close(self) -> None:
        """Nothing runs beside."""

    def finish(self, _timeout_s: float) -> tuple[Action, RuntimeError | None] | None:
        for work, _ in self.left:
            work.wait()
        return None


class _WaitedSends:
    """Sends of gloo, which says that one has ended to nobody but who waits for it: threads.

    What one peer takes over one channel it takes in order, so each channel has a thread that lets
    go of each value as soon as it has left.
    """

    def __init__(self) -> None:
        self.waiters: dict[tuple[int, bool], _Waiter] = {}

    def add(self, work: dist.Work, value: torch.Tensor, action: Action) -> None:
        channel = action.peer, action.is_grad
        if channel not in self.waiters:
            self.waiters[channel] = _Waiter()
        self.waiters[channel].queue.put((work, value, action))

    def settle(self) -> None:
        """Each thread does."""

    def close(self) -> None:
        for waiter in self.waiters.values():
            waiter.queue.put(None)

    def finish(self, timeout_s: float) -> tuple[Action, RuntimeError | None] | None:
        for waiter in self.waiters.values():
            waiter.join(timeout_s)
            if waiter.error is not None or waiter.is_alive():
                assert waiter.at is not None
                return waiter.at, waiter.error
        return None


class _Waiter(threading.Thread):
    """Waits for sends, one after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.queue: SimpleQueue[tuple[dist.Work, torch.Tensor, Action] | None] = SimpleQueue()
        self.at: Action | None = None  # the send that is being waited for
        self.error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        while self._wait_for_next():
            pass

    def _wait_for_next(self) -> bool:
        """Waits for one send; what it sent is let go of on return."""
        item = self.queue.get()
        if item is None:
            return False
        work, _, self.at = item
        try:
            work.wait()
        except RuntimeError as error:
            self.error = error
        return self.error is None


def message_tags(program: Program) -> dict[int, int]:
    """A tag for each message: its turn on its channel, odd for gradients."""
    turns: dict[tuple[int, ActionKind, bool], int] = {}
    tags: dict[int, int] = {}
    for k, action in enumerate(program.actions):
        if action.kind.is_message:
            key = action.peer, action.kind, action.is_grad
            turns[key] = turns.get(key, -1) + 1
            tags[k] = 2 * turns[key] + action.is_grad
    return tags
