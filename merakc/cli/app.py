"""The command line: plans made, shown and compared without ranks, weights or GPUs.

Exit codes: 0 where all is well, 1 where the answer is no (plans differ, nothing fits), 2 for
arguments that cannot be used. A command's module is imported when that command is asked for.
"""

from __future__ import annotations

import inspect
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from merakc.machines.garbage import few_collections, leave_garbage
from merakc.version import __version__

# In the order of `--help`; each is a function of its own name, or an app, in a module of that name.
COMMANDS = (
    "plan", "show", "diff", "calibrate", "scale", "budget", "simulate", "verify", "graph", "doctor",
    "checkpoint", "launch", "bench",
)  # fmt: skip


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once: packages that are interrupted while they are imported fail
    with errors of their own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_unread(out: os.stat_result) -> bool:
    """Whether the pipe that standard output was has no reader: rich then puts another file there,
    where others leave it.
    """
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    failed = any(event & select.POLLERR for _, event in poll.poll(0))
    return failed or not os.path.samestat(out, os.fstat(1))


def _help(command: Callable[..., None]) -> str:
    """A command's docstring with a paragraph a line, so that any terminal's width breaks it."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


class _Commands(TyperGroup):
    """The commands by their names."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command. That nobody reads its output to the end (`| head`) is nothing wrong."""
        out = os.fstat(1)
        try:
            return super().main(*args, **kwargs)
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError) and _is_unread(out):
                raise SystemExit(0) from None
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        """All of them."""
        return [*COMMANDS]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of that name. For one that is none the error names the nearest one."""
        if args and args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{args[0]}'.{hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The one of that name."""
        if cmd_name not in COMMANDS:
            return None
        ctx.with_resource(few_collections())  # until the command is done
        with _ended_by_ctrl_c():
            module = import_module(f"merakc.cli.{cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            function, settings = getattr(module, cmd_name), getattr(module, "SETTINGS", None)
            app.command(cmd_name, help=_help(function), context_settings=settings)(function)
        found = get_command(app)
        found.name = cmd_name
        return found


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False,
    help="Plans for training in 3D parallelism.",
)  # fmt: skip


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"merakc {__version__}")
        raise typer.Exit


@app.callback()
def _own_process(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    leave_garbage()
