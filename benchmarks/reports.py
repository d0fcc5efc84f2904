"""How a page of the documentation says what made it, and what went wrong."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version

from merakc.version import __version__

# Options that say where files are: they are the machine's, not the run's.
PLACES = ("--cache", "--json", "--doc", "--data", "--plot")


def told_command(module: str, arguments: Sequence[str]) -> str:
    """The command line of a benchmark, without what names files of this machine."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not (skip or argument.partition("=")[0] in PLACES):
            kept.append(argument)
        skip = argument in PLACES
    return shlex.join(["python", "-m", module, *kept])


def told_run(module: str, arguments: Sequence[str]) -> str:
    """The command, the date, the machine and the versions, in a sentence."""
    versions = [f"merakc {__version__}", *(f"{n} {version(n)}" for n in ("torch", "transformers"))]
    return (
        f"`{told_command(module, arguments)}`, {datetime.date.today()}, {platform.machine()} with "
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, {', '.join(versions)}."
    )


def one_line(reason: str) -> str:
    """A reason as an item of a Markdown list, without the paths of this machine."""
    return re.sub(
        r"(?:/[^/\s]+)*/(site-packages|benchmarks|merakc)/", r"\1/", " ".join(reason.split())
    )
