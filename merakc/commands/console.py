"""What all commands have in common: exit codes, the option for JSON, and how errors are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from merakc.errors import FitError, MerakError

NO, UNUSABLE = 1, 2
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def told(problem: Console) -> Iterator[None]:
    """An error of the user's is one message, and an exit code."""
    try:
        yield
    except MerakError as error:
        problem.print(
            f"{type(error).__name__}: {error}", style="red", highlight=False, markup=False
        )
        raise typer.Exit(NO if isinstance(error, FitError) else UNUSABLE) from error
    except OSError as error:  # a file that cannot be written
        problem.print(f"{error}; give another path", style="red", highlight=False, markup=False)
        raise typer.Exit(UNUSABLE) from error
