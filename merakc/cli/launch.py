"""`merakc launch`: a script on all ranks of this machine, by torchrun."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated

import torch
import typer
from rich.console import Console

from merakc.cli.console import progress_console, told
from merakc.errors import ConfigError
from merakc.files.printable import count_of
from merakc.ir.plan_file import load_plan
from merakc.machines.excepthook import ENDING

# torchrun's loggers, which repeat what it raises.
QUIET = ("multiprocessing.api", "agent.server.api")
SIGNALS = "SIGTERM,SIGHUP,SIGQUIT"  # that torchrun hands on: Ctrl-C comes to ranks by `agent`
# What stands behind the script is the script's.
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    script: Annotated[Path, typer.Argument(help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Ranks of this machine.", show_default="one for each GPU, or core", min=1
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Start as many ranks as this plan has.")] = None,
    nodes: Annotated[str, typer.Option(help="Number of machines, or a range: 2:4.")] = "1",
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT of the first machine, where there are several.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(help="How often a job that lost a rank is started again.", min=0)
    ] = 0,
) -> None:
    """Run a training script on all ranks of this machine, by torchrun, its settings made."""
    console = progress_console()
    with told(console):
        if not script.is_file():
            raise ConfigError(f"{script}: there is no such script")
        each = ranks_of_machine(ranks, plan, nodes)
        found = torchrun(each, nodes, rendezvous, max_restarts)
        own = settings(each, os.environ, alone=nodes == "1")
    command = [*found, "--", str(script), *(arguments or [])]  # whose options are its own
    shown = [*(f"{name}={value}" for name, value in own.items()), "torchrun", *command]
    console.print(f"merakc: {shlex.join(shown)}", soft_wrap=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.update(own)
    sys.exit(agent(command, console))


def agent(command: list[str], console: Console) -> int:
    """torchrun; of ranks that fail or are interrupted, which have said why, it tells in one line.
    The exit code.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    for name in QUIET:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with TemporaryDirectory() as folder:
        os.environ[ENDING], ending = folder, Path(folder)

        def interrupted(number: int, _: FrameType | None) -> None:
            end_starting(ending)
            raise SignalException("interrupted", sigval=signal.Signals(number))

        signal.signal(signal.SIGINT, interrupted)
        try:
            main(["--signals-to-handle", SIGNALS, *command])
        except ChildFailedError as error:
            each = (
                f"rank {rank}: {f'exit code {f.exitcode}' if f.exitcode > 0 else f.signal_name()}"
                for rank, f in sorted(error.failures.items())
            )
            console.print(f"merakc: all ranks have ended ({', '.join(each)})", soft_wrap=True)
            return 1
        except SignalException as error:
            if error.sigval == signal.SIGINT and not [*ending.iterdir()]:
                console.print("merakc: interrupted: all ranks have ended")
            return 128 + error.sigval
    return 0


def end_starting(ending: Path) -> None:
    """Ends the processes of this one that are no files of the folder: ranks that import modules,
    which an interruption leaves with tracebacks of any kind.
    """
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (thread / "children").read_text().split():
                if not (ending / pid).exists():
                    os.kill(int(pid), signal.SIGTERM)


def ranks_of_machine(ranks: int | None, plan: Path | None, nodes: str) -> int:
    """How many ranks this machine has. Raises `ConfigError` where that cannot be."""
    if plan is None:
        return ranks or torch.cuda.device_count() or len(os.sched_getaffinity(0))
    if not nodes.isdecimal() or int(nodes) == 0:
        raise ConfigError(f"--nodes {nodes}: a plan has its number of ranks; give one of machines")
    wanted = load_plan(plan).decisions.mesh.world_size
    if wanted % int(nodes) or (ranks or wanted // int(nodes)) * int(nodes) != wanted:
        given = f"--nodes {nodes}" + (f" and --ranks {ranks}" if ranks else "")
        raise ConfigError(
            f"{plan} is of {count_of(wanted, 'rank')}, which {given} do not make; leave --ranks "
            "out, and give a number of machines that divides them"
        )
    return wanted // int(nodes)


def torchrun(ranks: int, nodes: str, rendezvous: str | None, max_restarts: int) -> list[str]:
    """The arguments of torchrun. Raises `ConfigError`."""
    found = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", nodes)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise ConfigError(f"--nodes {nodes}: give a number of machines, or a range such as 2:4")
    if rendezvous is not None and not re.fullmatch(r".+:\d{1,5}", rendezvous):
        raise ConfigError(f"--rendezvous {rendezvous}: give HOST:PORT, such as node0:29400")
    if nodes == "1" and rendezvous is None:
        where = ["--standalone"]
    elif rendezvous is None:
        raise ConfigError(f"--nodes {nodes}: give --rendezvous HOST:PORT, the same on all of them")
    else:
        where = [
            "--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous,
        ]  # fmt: skip
    again = ["--max-restarts", str(max_restarts)] if max_restarts else []
    return [*where, "--nproc-per-node", str(ranks), *again]


def settings(ranks: int, given: Mapping[str, str], *, alone: bool) -> dict[str, str]:
    """What the ranks' environment lacks: threads that share the cores, where torchrun gives each
    one; one order of sets, which forwards may go by; and on one machine whose name says nothing the
    address by which gloo finds itself.
    """
    found = {} if "PYTHONHASHSEED" in given else {"PYTHONHASHSEED": "0"}
    if "OMP_NUM_THREADS" not in given:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if alone and "GLOO_SOCKET_IFNAME" not in given and not _has_address():
        found["GLOO_SOCKET_IFNAME"] = "lo"
    return found


def _has_address() -> bool:
    with suppress(OSError):
        return bool(socket.gethostbyname(socket.gethostname()))
    return False
