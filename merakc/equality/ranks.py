"""Runs a function on several ranks of this machine, forked from the warm parent.

A fork after `import torch` starts eight ranks in a third of a second, where `torchrun` or `spawn`
takes ten: a check of a plan, and tests, can afford real process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from merakc.errors import ConfigError, MerakError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAST_WORDS_S = 1.0
_CHILD_S = 3600.0  # what takes longer hangs


class RankError(RuntimeError):
    """The first rank that failed: its number, and its traceback as text.

    Its `__cause__` is the rank's own exception, where that can be pickled.
    """

    def __init__(self, rank: int, details: str) -> None:
        super().__init__(f"rank {rank} failed:\n{details}")
        self.rank = rank
        self.details = details


class RankTimeoutError(TimeoutError):
    """The ranks that had not returned in time; all ranks have been killed."""

    def __init__(self, ranks: tuple[int, ...], world_size: int, timeout_s: float) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"ranks {names} of {world_size} had not returned after {timeout_s} s")
        self.ranks = ranks


def run_ranks(
    world_size: int,
    function: Callable[..., T],
    *args: Any,
    timeout_s: float = 120.0,
    enter: Callable[[int], None] | None = None,
    backend: str = "gloo",
) -> list[T]:
    """Calls `function(*args)` on `world_size` forked ranks and returns their results in order.

    Each rank computes on one thread, inside a gloo process group, with `RANK`, `LOCAL_RANK` and
    `WORLD_SIZE` set; `enter(rank)` is called before. Results must be picklable, the function and
    its arguments need not be. Raises `RankError` for the first rank that failed and
    `RankTimeoutError` after `timeout_s`; in both cases the other ranks are killed.
    """
    context = multiprocessing.get_context("fork")
    sys.stdout.flush()  # or every child would print the buffered text again
    sys.stderr.flush()
    gc.collect()  # or every child would keep the garbage
    with _store_file() as store:
        processes: list[ForkProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                # One pipe at a time: a rank that held a copy of another's end would hide its death.
                ours, theirs = context.Pipe()
                connections.append(ours)
                first = enter or (lambda _: None)
                place = store, theirs, timeout_s, first, backend
                call = (rank, world_size, *place, function, args)
                process = context.Process(target=_run_rank, args=call, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
            return _collect(connections, timeout_s)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for connection in connections:
                connection.close()


def in_child(function: Callable[..., T], *args: Any) -> T:
    """What `function(*args)` returns in a forked child, so that no thread of it is left here.

    The result must be picklable. Raises the `MerakError` that it raises, `RankError` for others.
    """
    try:
        return run_ranks(1, function, *args, timeout_s=_CHILD_S, backend="")[0]
    except RankError as error:
        if isinstance(error.__cause__, MerakError):
            raise error.__cause__ from error
        raise


def check_forks() -> None:
    """Raises `ConfigError` where no fork of this process can run a backward."""

    def backward() -> None:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]

    try:
        in_child(backward)
    except RankError as error:
        raise ConfigError(
            "this process has run a backward, or has opened a GPU, and torch runs none in ranks "
            "that are forked from it; check the plan by merakc verify, or in a process that has "
            f"not ({error.details.strip().splitlines()[-1]})"
        ) from error


@contextlib.contextmanager
def _store_file() -> Iterator[str]:
    """The path of a file through which ranks meet; in memory, where it ends with the process."""
    if sys.platform != "linux":
        with tempfile.TemporaryDirectory(prefix="merakc-ranks-") as folder:
            yield f"{folder}/store"
        return
    file = os.memfd_create("merakc-ranks")
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    """Waits for one message of every rank; raises for the first rank that gives no result.

    The sockets of a rank that dies close before its pipe: a peer that fails because of it may be
    heard first. So once one has failed, the others have `_LAST_WORDS_S` to say that they did.
    """
    deadline_s = time.monotonic() + timeout_s
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, BaseException | None]] = []
    while waiting:
        left_s = _LAST_WORDS_S if failures else max(0.0, deadline_s - time.monotonic())
        ready = wait(list(waiting), left_s)
        if not ready and not failures:
            raise RankTimeoutError(tuple(waiting.values()), len(connections), timeout_s)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                time_s, ok, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                # Its peers fail because of it, with messages of their own: it comes first.
                failures.append((0.0, rank, "the process died without a word", None))
                continue
            if ok:
                results[rank] = value
            else:
                failures.append((time_s, rank, *value))
    if failures:
        _, rank, details, cause = min(failures, key=lambda failure: failure[0])
        raise RankError(rank, details) from cause
    return [results[rank] for rank in range(len(connections))]


def _run_rank(
    rank: int,
    world_size: int,
    store: str,
    connection: Connection,
    timeout_s: float,
    enter: Callable[[int], None],
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The whole life of a child. It never returns: `os._exit` skips the parent's exit handlers."""
    code = 0
    try:
        _prepare(rank, world_size if backend else 0)
        enter(rank)
        if backend:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        message = pickle.dumps((time.monotonic(), True, function(*args)))
    except BaseException as error:
        code = 1
        value = traceback.format_exc(), _picklable(error)
        message = pickle.dumps((time.monotonic(), False, value))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(message)
        if code == 0:
            # The peers may still need this rank's sockets; the parent kills it when all are done.
            signal.pause()
    os._exit(code)


def _picklable(error: BaseException) -> BaseException | None:
    """The error if it survives the way to the parent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _prepare(rank: int, world_size: int) -> None:
    """Sets up a freshly forked child, and lets it die with its parent; it is no rank in a world of
    size 0.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Where the host's name does not resolve, gloo finds no interface by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    gc.freeze()  # what is the parent's is in use: no search for garbage need walk through it
    # torch lets go of its code generator's processes in a fork, and not of its threads, which are
    # not there: what was given to them would be waited for without an end.
    if (compiling := sys.modules.get("torch._inductor.async_compile")) is not None:
        compiling.AsyncCompile.pool.cache_clear()
