"""Scripts and commands of the pages, as a user starts them, in processes forked from this one.

A process of its own imports torch and transformers for five seconds first. That the commands and
`torchrun` start one, `test_readme.py` and `cli/test_launch.py` show.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM  # noqa: F401  # once, and not in every rank
from typer.testing import CliRunner

from merakc.cli.app import app
from merakc.equality.ranks import run_ranks
from merakc.passes import running
from merakc.report.terminal import QUIET

COLUMNS = 110  # of the terminal
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@contextlib.contextmanager
def _as_outside() -> Iterator[None]:
    """As outside of tests: warnings are no errors, and what every pass gives is not verified."""
    with warnings.catch_warnings(), patch.object(running, "CHECKED", False):
        warnings.simplefilter("ignore")
        yield


def _run(folder: Path, name: str) -> str:
    """What a script prints on a rank that torchrun, or nobody, has made one of several."""
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
        for variable in OF_RANKS:
            del os.environ[variable]
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()) as out, _as_outside():
        runpy.run_path(name, run_name="__main__")
    return out.getvalue()


def printed(folder: Path, script: str, ranks: int = 1) -> str:
    """What a script prints that stands in a folder, on all of its ranks."""
    (folder / "train.py").write_text(script)
    return "".join(run_ranks(ranks, _run, folder, "train.py", timeout_s=240))


def losses(text: str) -> list[float]:
    """The losses of the steps that a script tells."""
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", text)]


def told(folder: Path, command: str, status: int = 0) -> str:
    """What a `merakc ...` prints in a folder, and it must exit with this."""
    with contextlib.chdir(folder), _as_outside():
        done = CliRunner().invoke(
            app, command.split()[1:], env={"COLUMNS": str(COLUMNS), QUIET: "1"}
        )
    assert done.exit_code == status, f"{command}\n{done.output}\n{done.exception}"
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
