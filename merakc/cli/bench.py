"""`merakc bench`: the comparison with other systems, of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from merakc.cli.console import progress_console, told
from merakc.errors import ConfigError

MODULE = "benchmarks.peers"
# Its options are the benchmark's own, `--help` included.
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Time merakc beside other systems: python -m benchmarks.peers, of a checkout."""
    with told(progress_console()):
        root = checkout(Path(__file__))
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *context.args],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    raise typer.Exit(done.returncode)


def checkout(module: Path) -> Path:
    """The folder that holds the benchmarks beside the package that a module is of.

    Raises `ConfigError` where there is none: an installed merakc has no benchmarks.
    """
    root = module.resolve().parents[2]
    if not (root / MODULE.replace(".", os.sep) / "__main__.py").is_file():
        raise ConfigError(
            f"merakc bench runs {MODULE}, which is no part of an installed merakc, and {root} does "
            "not hold it; clone the repository and run `make install` there"
        )
    return root
