"""The ranks of one job, the calls that all of them must make, and the errors where one does not.

Every such call is numbered. A rank whose call is the one that was to be expected goes on; any
other asks first whether all ranks have come to it with the same facts, so that no two ranks ever
run collectives that do not fit each other. Whatever ends a wait (a closed connection, a timeout)
becomes one error that names the rank to look at.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from merakc.errors import MerakError, MerakWarning, StuckError, failure
from merakc.runtime.health.channel import Channel, Client, Hub
from merakc.runtime.health.facts import ALL, Expected, Fault, State, Status
from merakc.runtime.health.judge import CALLS, GRACE_S, Message
from merakc.runtime.health.meeting import meet
from merakc.runtime.health.sockets import Connections

TIMEOUT_S = 600.0
# What rank 0 does alone while the others wait (planning, writing files) may take so long whatever
# `timeout_s` is: that it lives, its beats say.
ALONE_S = 3600.0
# How long to wait for the judge's word on a failure, beyond its own grace.
WORD_S = 2.0
# After so long a call that every rank must make says of whom it waits.
NOTICE_S = 5.0
# What failed messages and collectives say: gloo's errors have no class of their own.
_SIGNS = ("gloo", "timed out", "Timed out", "Connection ", "Broken pipe", "NCCL", "ncclUnhandled")


class Job:
    """One rank's side of a job: all ranks of a default process group."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self.whole = weakref.ref(dist.group.WORLD)
        self.process, self.owner = os.getpid(), threading.get_ident()
        self.here = Status()
        self.doing: Callable[[], str] | None = None
        self.fault: Fault | None = None
        self.channel: Channel | None = None
        self.agreed = self.pending = 0
        self.news = threading.Event()
        self.expected: dict[str, Expected] = defaultdict(Expected)
        self.past: deque[Status] = deque(maxlen=CALLS)  # as they were entered
        self.connections = Connections()
        self.world: dist.ProcessGroup | None = None

    # ------------------------------------------------------------------ for the channel's thread

    def status(self) -> Status:
        """Where this rank is."""
        doing = self.doing
        return replace(self.here, doing=doing()) if doing is not None else self.here

    def handle(self, message: Message) -> None:
        """What the channel brings."""
        if "agreed" in message:
            self.agreed = message["agreed"]
            self.news.set()
        elif "pending" in message:
            call, channel = message["pending"], self.channel
            self.pending = max(call, self.pending)
            if self.here.call >= call and channel is not None:
                channel.post(self._at(call))
        elif "fault" in message and self.fault is None:
            self.fault = Fault.read(message["fault"])
            self.news.set()
            self.connections.shut()

    def _at(self, call: int) -> Status:
        """Where this rank is; where it was, of a call that lies behind it."""
        forgotten = Status(call, facts={ALL: f"a call before the last {CALLS} of this rank"})
        old = next((own for own in tuple(self.past) if own.call == call), forgotten)
        return self.status() if call == self.here.call else old

    def over(self) -> bool:
        """Whether the process group that this watches has gone."""
        return not dist.is_initialized() or self.whole() is not dist.group.WORLD

    # ------------------------------------------------------------------ calls

    def begin(self, name: str, facts: Mapping[str, str], *, prompt: bool) -> None:
        """Enters a call that every rank must make; see `call`."""
        self.check()
        unknown = tuple([s for s, fact in facts.items() if not self.expected[s].comes(fact)])
        self.past.append(here := Status(self.here.call + 1, name, facts, State.IN))
        self.here = here
        if self.channel is None:
            return
        if unknown:
            self._ask(replace(here, asks=unknown), prompt=prompt)
        elif self.pending >= here.call:
            self.channel.post(here)
        self.check()

    def check(self) -> None:
        """Raises the error that ranks have in common, once there is one."""
        if self.fault is not None:
            error = self._error()
            self.here = replace(self.here, state=State.FAILED)
            raise error

    def _ask(self, status: Status, *, prompt: bool) -> None:
        """Waits until all ranks have come to this call, with the same facts."""
        assert self.channel is not None
        start_s, told = monotonic(), not prompt
        self.news.clear()
        self.channel.post(status)
        while self.agreed < status.call and self.fault is None:
            waited_s = monotonic() - start_s
            if not told and waited_s > NOTICE_S:
                told = True
                warnings.warn(
                    f"rank {self.rank} has waited for {waited_s:.0f} s in {status.name}, which "
                    "every rank must call: some rank has not come to it",
                    MerakWarning,
                    stacklevel=4,
                )
            if waited_s > self.timeout_s + 2 * WORD_S:  # the judge would have spoken
                self._alone(f"nobody answered in {status.name}")
                break
            self.news.wait(min(1.0, self.timeout_s))
            self.news.clear()

    def end(self, error: BaseException | None) -> None:
        """Leaves a call. Raises the error that ranks have in common, where `error` is of a wait."""
        self.doing, here, doing = None, self.here, self.status().doing
        if error is None:
            self.here = replace(here, state=State.OUT)
            self.check()
            return
        text = failure(error)
        stuck = isinstance(error, StuckError) or _is_of_a_wait(error)
        others_too = self.fault is None or text in self.fault.text
        if stuck or (isinstance(error, Exception) and not others_too):
            self.here = replace(here, state=State.BROKEN, text=text, doing=doing)
            self._explain(text)
            try:
                self.check()
            except MerakError as told:
                raise told from None  # what gloo says names no rank
        self.here = replace(here, state=State.FAILED, text=text, doing=doing)
        if self.channel is not None:
            self.channel.post(self.here)

    def _explain(self, text: str) -> None:
        """Waits for the judge's word on a failure of this rank; without one, blames what it can."""
        if self.fault is None and self.channel is not None:
            self.channel.post(self.here)
            self.wait_for_fault(GRACE_S + WORD_S)
        self._alone(text)

    def wait_for_fault(self, limit_s: float) -> None:
        """Waits so long for the judge's word."""
        until_s = monotonic() + limit_s
        while self.fault is None and (left_s := until_s - monotonic()) > 0:
            self.news.wait(left_s)
            self.news.clear()

    def _alone(self, text: str) -> None:
        """Without a word of rank 0's: it is that rank, if any."""
        if self.fault is None:
            if isinstance(self.channel, Client) and monotonic() > self.channel.heard_s + WORD_S:
                self.channel.blame_silence()
            else:
                self.fault = Fault((), f"a rank was lost, or is stuck: {text}")

    def _error(self) -> MerakError:
        assert self.fault is not None
        return self.fault.error(self.rank, self.here, self.timeout_s)

    # ------------------------------------------------------------------ beginning and end

    def group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        backend: str | None = None,
        options: Any = None,
    ) -> dist.ProcessGroup:
        """A process group of these ranks; every rank must make it.

        It is made in a thread, since nothing but its own timeout ends that wait once a rank is
        lost. Raises what the ranks have in common as soon as that is known.
        """
        time = timedelta(seconds=timeout_s)
        make = partial(dist.new_group, list(ranks), time, backend, options)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        made: Future[dist.ProcessGroup] = Future()
        made.add_done_callback(lambda _: self.news.set())

        def work() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # which belongs to a thread
                made.set_result(self.connections.made(make))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=work, name="merakc-group", daemon=True).start()
        while not made.done() and self.fault is None:
            self.news.wait(1.0)
            self.news.clear()
        if not made.done():
            self.check()
        return made.result()

    def join(self, store: Store) -> None:
        """Connects the ranks with each other, and makes the group of all; all at once."""
        of_channel = self.status, self.handle, self.over
        self.channel = meet(store, self.rank, self.size, self.timeout_s, *of_channel)
        try:
            self.world = self.group(range(self.size), self.timeout_s)
        except RuntimeError as error:
            self.end(error)
            raise
        # While it was made, that a rank was lost was seen by this time alone.
        _set_pg_timeout(timedelta(seconds=max(self.timeout_s, ALONE_S)), self.world)

    def close(self) -> None:
        """Leaves the job, which is nothing wrong."""
        if self.channel is not None and os.getpid() == self.process:
            self.channel.close()
            self.channel = None

    def watch_exit(self) -> None:
        """Says goodbye when the process ends, and with which error."""
        here = weakref.ref(self)

        def leave() -> None:
            job = here()
            if job is not None:
                job.close()

        atexit.register(leave)
        multiprocessing.util.Finalize(None, leave, exitpriority=0)
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            job = here()
            if job is not None and job.channel is not None and os.getpid() == job.process:
                job.channel.say_dying(failure(error))
                if not hasattr(sys, "ps1"):  # where somebody types, the process goes on
                    job.close()
            before(kind, error, trace)

        sys.excepthook = hook

    def forked(self) -> None:
        """In a process that was forked from this rank: it has no part in the job."""
        if self.channel is not None:
            self.channel.drop()
            self.channel = None


def _is_of_a_wait(error: BaseException) -> bool:
    """Whether a message or a collective has failed."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


_jobs: list[Job] = []


def _forked() -> None:
    while _jobs:
        _jobs.pop().forked()


os.register_at_fork(after_in_child=_forked)


def job() -> Job | None:
    """The job that this process is a rank of, if it was started and its process group lives."""
    while _jobs and _jobs[-1].over():
        _jobs.pop().close()
    return _jobs[-1] if _jobs else None


def start_job(timeout_s: float) -> None:
    """Joins the ranks of the default process group; all must call it. Again, only sets the time.

    Raises `StuckError` where a rank has not come after `timeout_s`.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found = job()
    if found is not None:
        found.timeout_s = timeout_s
        if isinstance(found.channel, Hub):
            found.channel.judge.timeout_s = timeout_s
        elif isinstance(found.channel, Client):
            found.channel.timeout_s = timeout_s
        return
    whole = _get_default_store()
    turn = whole.add(f"merakc {dist.get_rank()}", 1)  # of the jobs that used this store
    found = Job(timeout_s)
    try:
        found.join(PrefixStore(f"merakc {turn}", whole))
    except BaseException:
        found.close()
        raise
    found.watch_exit()
    _jobs.append(found)


def new_group(
    ranks: Sequence[int],
    timeout_s: float = TIMEOUT_S,
    backend: str | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """A process group of these ranks, whose waits end when a rank is lost; all ranks make it.
    `options` are those of its backend.
    """
    found = job()
    if found is not None:
        return found.group(ranks, timeout_s, backend, options)
    time = timedelta(seconds=timeout_s)
    made: dist.ProcessGroup = dist.new_group(list(ranks), time, backend, options)
    return made


def all_ranks() -> dist.ProcessGroup | None:
    """The group of all ranks for what is not part of a step; None is the default one."""
    found = job()
    return found.world if found is not None else None


def explained(error: RuntimeError) -> Exception:
    """What ended a wait in another thread than that of the calls: the fault, if there is one."""
    found = job()
    if found is None or not _is_of_a_wait(error):
        return error
    found.wait_for_fault(GRACE_S)
    return found.fault.error(found.rank, found.here, found.timeout_s) if found.fault else error


def at_work(doing: Callable[[], str] | None) -> None:
    """Says how to ask at what a rank is inside its call."""
    found = job()
    if found is not None and found.owner == threading.get_ident():
        found.doing = doing


def inside() -> str:
    """The call that this thread is in and that every rank must make; nothing outside of any."""
    found = job()
    is_in = found is not None and found.here.state is State.IN
    return found.here.name if found and is_in and found.owner == threading.get_ident() else ""


@contextmanager
def call(
    name: str, facts: Mapping[str, str] | None = None, *, prompt: bool = True
) -> Iterator[None]:
    """A call that every rank must make, in the same order. Calls inside it are part of it.

    `facts` are what ranks must have in common, by scope (`Status`); the name alone, if not given.
    With `prompt` it says soon of whom it waits. Raises `MismatchError` where ranks went different
    ways, and `StuckError` where one is lost, stopped, or does not come, on every rank.
    """
    found = job()
    inside = found is None or found.here.state is State.IN or found.owner != threading.get_ident()
    if found is None or inside:
        yield
        return
    try:
        found.begin(name, facts or {ALL: name}, prompt=prompt)
        yield
    except BaseException as error:
        found.end(error)
        raise
    found.end(None)
