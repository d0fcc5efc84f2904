"""One trial: ranks forked from this warm process, a fault, and what all of them say and leave."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import re
import signal
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults.work import LAYOUTS, Kind, pick_victim, work
from merakc.errors import MismatchError, StuckError

# What is allowed after a rank was lost, and beyond `timeout_s` after one was stopped; errors of a
# rank that lives are waited for a little, since others may make the same.
LOST_S, BEYOND_S = 2.0, 10.0
# For everything before the fault.
START_S = 60.0
MOMENTS_S = 0.6  # faults from outside come at any moment of so long a time
_PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What became of a trial: seconds from the fault until the last rank had raised, and ended."""

    kind: str
    layout: str
    victim: int
    raised_s: float = 0.0
    ended_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


@dataclass
class Rank:
    """A forked rank, as seen from here."""

    process: int
    pipe: int
    left: bytes = b""
    said: dict[str, Any] = field(default_factory=dict)
    ended_s: float | None = None
    status: int = 0

    def read(self) -> None:
        """What it has said since, and whether it has ended."""
        with suppress(BlockingIOError):
            while data := os.read(self.pipe, 65536):
                self.left += data
        *lines, self.left = self.left.split(b"\n")
        for line in lines:
            name, when_s, value = json.loads(line)
            self.said[name] = (when_s, value)
        if self.ended_s is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                self.ended_s, self.status = time.monotonic(), status
                self.read()


class Trial:
    """A trial that runs; `poll` it until it gives an outcome."""

    def __init__(
        self, kind: Kind, layout: str, plan: Path, timeout_s: float, slack_s: float,
        pick: random.Random,
    ) -> None:  # fmt: skip
        self.kind, self.timeout_s, self.slack_s = kind, timeout_s, slack_s
        self.outcome = Outcome(kind.name, layout, pick_victim(kind, layout, pick))
        self.delay_s, at_step = pick.uniform(0.0, MOMENTS_S), pick.randrange(kind.first_step, 30)
        degrees = LAYOUTS[layout]
        self.start_s, self.fault_s, self.due_s = time.monotonic(), None, None
        self.store = os.memfd_create("merakc-faults")
        size = degrees["dp"] * degrees["tp"] * degrees["pp"]
        self.ranks: list[Rank] = []
        for rank in range(size):
            args = kind, self.outcome.victim, at_step, plan, timeout_s
            self.ranks.append(_fork(rank, size, self.store, args))

    @property
    def limit_s(self) -> float:
        """How long after the fault all must have ended."""
        return self.slack_s + (self.timeout_s + BEYOND_S if self._is_slow else LOST_S)

    @property
    def _is_slow(self) -> bool:
        """Whether the others wait: for who may come yet, or may fail like them."""
        kind, victim = self.kind, self.ranks[self.outcome.victim]
        return kind.waits or kind.early or "ready" not in victim.said or kind.deviate is not None

    def poll(self) -> Outcome | None:
        """The outcome, once all ranks have ended or the time is over."""
        now = time.monotonic()
        for rank in self.ranks:
            rank.read()
        victim = self.ranks[self.outcome.victim]
        self._strike(victim, now)
        others = [r for r in self.ranks if r is not victim]
        only = all(r.ended_s is not None for r in others) and victim.ended_s is None
        if only and self.kind.signal == "SIGSTOP":
            os.kill(victim.process, signal.SIGCONT)  # it, too, is to end then
        over = now > (self.start_s + START_S if self.fault_s is None
                      else self.fault_s + self.limit_s + 5.0)  # fmt: skip
        if not over and any(r.ended_s is None for r in self.ranks):
            return None
        self._judge(victim, others)
        self._clean()
        return self.outcome

    def _strike(self, victim: Rank, now: float) -> None:
        """Sends the fault, once it is time; or notes that the victim has done its own."""
        if self.fault_s is not None:
            return
        if "deviates" in victim.said:
            self.fault_s = victim.said["deviates"][0]
        elif self.kind.signal:
            name = "begin" if self.kind.early else "ready"
            if all(name in r.said for r in self.ranks):
                if self.due_s is None:
                    self.due_s = now + self.delay_s
                if now >= self.due_s and victim.ended_s is None:
                    self.fault_s = time.monotonic()
                    os.kill(victim.process, getattr(signal, self.kind.signal))

    def _judge(self, victim: Rank, others: list[Rank]) -> None:
        found = self.outcome
        if self.kind.legal:
            found.problems += [
                f"rank {k} failed: {r.said.get('failed', '')}"
                for k, r in enumerate(self.ranks) if "done" not in r.said
            ]  # fmt: skip
            return
        if self.fault_s is None:
            told = {k: r.said.get("failed", (0, ""))[1] for k, r in enumerate(self.ranks)}
            found.problems.append(f"the fault did not come about: {told}")
            return
        own_s, told = victim.said.get("failed", (0.0, None))
        if told is not None:
            found.texts[found.victim] = ": ".join(told)
            if told[0] not in (StuckError.__name__, MismatchError.__name__):
                self.fault_s = own_s  # what led to it took its time
        alive = [k for k, r in enumerate(self.ranks) if r.ended_s is None]
        if alive:
            found.problems.append(f"ranks {alive} had not ended")
        for rank in others:
            number = self.ranks.index(rank)
            when_s, (kind, text) = rank.said.get("failed", (0.0, ("nothing", "")))
            found.texts[number] = f"{kind}: {text}"
            if kind not in (StuckError.__name__, MismatchError.__name__):
                status = os.waitstatus_to_exitcode(rank.status)
                found.problems.append(f"rank {number} raised {kind}: {text[:300]} (exit {status})")
            elif not _names(text, found.victim):
                found.problems.append(f"rank {number} does not name rank {found.victim}: {text}")
            found.raised_s = max(found.raised_s, when_s - self.fault_s)
        found.ended_s = max((r.ended_s or time.monotonic()) - self.fault_s for r in others)
        if found.ended_s > self.limit_s:
            found.problems.append(f"ended {found.ended_s:.1f} s after, {self.limit_s:g} allowed")

    def _clean(self) -> None:
        for rank in self.ranks:
            if rank.ended_s is None:
                os.kill(rank.process, signal.SIGKILL)
                os.waitpid(rank.process, 0)
            os.close(rank.pipe)
            with suppress(ProcessLookupError):  # children that it started
                os.killpg(rank.process, 0)
                self.outcome.problems.append(f"process group {rank.process} was left")
                os.killpg(rank.process, signal.SIGKILL)
        os.close(self.store)


def _names(text: str, victim: int) -> bool:
    """Whether an error names a rank as the one to look at, or says what is otherwise on it."""
    named = re.match(r"ranks? ([\d, ]+)", text)
    first = named is not None and str(victim) in re.findall(r"\d+", named[1])
    return first or re.search(rf"on rank {victim}\b", text) is not None


def shared() -> set[str]:
    """What stands in shared memory, and among temporary files of this process and its ranks."""
    folders = Path("/dev/shm"), Path(os.environ["TMPDIR"])
    return {str(path) for folder in folders for path in folder.iterdir()}


def leftovers(before: set[str]) -> list[str]:
    """What has been added to them since."""
    return sorted(p for p in shared() - before if Path(p).exists())


def _fork(rank: int, size: int, store: int, args: tuple[Any, ...]) -> Rank:
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    process = os.fork()
    if process:
        os.close(theirs)
        os.set_blocking(ours, False)
        return Rank(process, ours)
    os.close(ours)
    code = 1
    try:
        code = _live(rank, size, store, theirs, args)
    finally:
        os._exit(code)


def _live(rank: int, size: int, store: int, pipe: int, args: tuple[Any, ...]) -> int:
    """The whole life of a rank, which ends as a process of Python's own does."""
    os.setpgid(0, 0)
    weakref.finalize._registry.clear()  # the parent's temporary folders are not this process's
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)

    def say(name: str, value: Any = None) -> None:
        os.write(pipe, json.dumps([name, time.monotonic(), value]).encode() + b"\n")

    code = 0
    try:
        dist.init_process_group(
            "gloo", init_method=f"file:///proc/self/fd/{store}", rank=rank, world_size=size
        )
        work(*args, say)
    except SystemExit:
        pass
    except BaseException as error:
        code = 1
        say("failed", [type(error).__name__, str(error)])
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    return code
