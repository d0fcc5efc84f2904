"""What all commands have in common: exit codes, the option for JSON, and how errors are told."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, RenderableType

from merakc.errors import ConfigError, FitError, MerakError, MerakWarning
from merakc.files.reading import read_text
from merakc.report.run import WARM_UP_STEPS
from merakc.report.terminal import QUIET, Terminal, changing_line
from merakc.report.yields import Goal, parse_count

NO, UNUSABLE = 1, 2
STOPPED = 130  # as shells say of what Ctrl-C has ended
EVERY_S = 10.0  # between two lines where there is no terminal
PRICED = "of a whole training: give its --tokens too"
PICTURES = (".png", ".svg", ".pdf")
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that a config names.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SampleTokens = Annotated[int | None, typer.Option("--seq", help="Tokens of a sample.", min=1)]
DataParallel = Annotated[int | None, typer.Option(help="Data-parallel degree.", min=1)]
TensorParallel = Annotated[int | None, typer.Option(help="Tensor-parallel degree.", min=1)]
PipelineRanks = Annotated[int | None, typer.Option(help="Pipeline ranks.", min=1)]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches of each dp rank.", min=1)]
Figures = Annotated[Path | None, typer.Option("--csv", help="Write the figures to this file.")]
Drawing = Annotated[
    Path | None, typer.Option("--plot", help="Draw the figures: a .png, .svg or .pdf.")
]
StateShards = Annotated[
    str | None,
    typer.Option(
        help="zero-0 to zero-3, or the shards of parameters, gradients and optimizer state: 1,1,8."
    ),
]
SharingSequences = Annotated[
    int | None, typer.Option("--cp", help="Ranks over which a sequence is split.", min=1)
]
SharingExperts = Annotated[
    int | None, typer.Option("--ep", help="Ranks over which experts are split.", min=1)
]
LoadOfExperts = Annotated[
    str | None,
    typer.Option(
        "--expert-load", help="Tokens that each expert is taken to get: 4,2,1,1, or a file."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Tokens of a whole training (300B, 1.5T), of which days, energy and price are told."
    ),
]
Limit = Annotated[
    float | None,
    typer.Option(help="Seconds after which the search ends with the best so far.", min=0.001),
]
Offload = Annotated[
    str, typer.Option(help="none, auto, optimizer, activations, parameters, or how much (8GiB).")
]
Skip = Annotated[
    int | None,
    typer.Option(
        help="First steps of a run that are left out.", show_default=f"{WARM_UP_STEPS}", min=0
    ),
]
Price = Annotated[float | None, typer.Option(help="Price of a device for an hour.", min=0)]


def progress_console() -> Terminal:
    """Where progress and errors go: standard error, and nothing in a name is taken for markup."""
    return Terminal(stderr=True, highlight=False)


def answer(figures: Any, shown: RenderableType, *, as_json: bool) -> None:
    """Prints what a command has found: figures as JSON, or a table of them."""
    if as_json:
        Terminal().print_json(json.dumps(figures))
    else:
        Terminal().print(shown)


@contextmanager
def working(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, `text` first, while it is; gives what tells of the next. Where
    there is no terminal, it is a line every few seconds.
    """
    if not console.is_terminal:
        first_s = last_s = time.monotonic()

        def tell(now: str) -> None:
            nonlocal last_s
            if time.monotonic() - last_s >= EVERY_S and not os.environ.get(QUIET):
                last_s = time.monotonic()
                console.print(f"{now}, after {last_s - first_s:.0f} s")

        yield tell
        return
    with changing_line(console, text) as line:
        yield lambda now: line.update(line.task_ids[0], description=now)


@contextmanager
def ending_after(limit_s: float | None) -> Iterator[None]:
    """Ends what is done inside as Ctrl-C does, after so many seconds; never where None."""
    if limit_s is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def told(problem: Console) -> Iterator[None]:
    """An error of the user's is one message, and an exit code; warnings of ours are a line."""
    # It tells with a traceback what fails in the user's forward, and raises it besides.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    with _warnings_told(problem):
        try:
            yield
        except MerakError as error:
            _say(problem, f"{type(error).__name__}: {error}")
            raise typer.Exit(NO if isinstance(error, FitError) else UNUSABLE) from error
        except KeyboardInterrupt as error:
            _say(problem, "stopped before there was anything to show")
            raise typer.Exit(STOPPED) from error
        except OSError as error:  # a file that cannot be written
            _say(problem, f"{error}; give another path")
            raise typer.Exit(UNUSABLE) from error


@contextmanager
def _warnings_told(problem: Console) -> Iterator[None]:
    others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, MerakWarning):
            _say(problem, f"{category.__name__}: {message}", "yellow")
        else:
            others(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = others


def _say(problem: Console, text: str, style: str = "red") -> None:
    # In a file or a pipe a message is one line, to be searched for.
    problem.print(
        text, style=style, soft_wrap=not problem.is_terminal, markup=False, emoji=False,
        highlight=False,
    )  # fmt: skip


def check_used(are_used: bool, what: str, **options: object) -> None:
    """Refuses options that are given, by their names, where nothing would come of them; `what` says
    what they are of, and what to give.

    Raises `ConfigError`.
    """
    for name, value in options.items():
        if not are_used and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is {what}, or leave {option} out")


def goal_of(tokens: str | None, price: float | None, *, is_told: bool = True) -> Goal:
    """What a training is to see, and a device's price; neither where that is not told of.

    Raises `ConfigError`.
    """
    check_used(is_told, "of what is told as text: give no other form", tokens=tokens, price=price)
    check_used(tokens is not None, PRICED, price=price)
    return Goal(parse_count(tokens) if tokens is not None else 0.0, price or 0.0)


def shards_of(text: str | None) -> str | tuple[int, ...] | None:
    """`1,1,8` as numbers; a name as it is. Raises `ConfigError`."""
    if text is None or "," not in text:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--state-shards {text}: give zero-1 to zero-3, or three numbers such as 1,1,8"
        ) from error


def load_of(text: str | None) -> tuple[float, ...]:
    """Tokens by expert: `4,2,1,1`, or a file of such numbers. Raises `ConfigError`."""
    if text is None:
        return ()
    given = read_text(Path(text)) if Path(text).is_file() else text
    try:
        return tuple(float(part) for part in given.strip(" []\n").split(","))
    except ValueError as error:
        raise ConfigError(
            f"--expert-load {text}: give how many tokens each expert gets, such as 4,2,1,1, or a "
            "file of these numbers"
        ) from error


def warm_up(skip: int | None) -> int:
    """How many steps of a run are left out."""
    return WARM_UP_STEPS if skip is None else skip


def check_picture(option: str, path: Path | None) -> None:
    """Raises `ConfigError` for a name that is no picture's."""
    if path is not None and path.suffix not in PICTURES:
        raise ConfigError(f"--{option} {path}: its name must end with one of {', '.join(PICTURES)}")


def check_outputs(**paths: Path | None) -> None:
    """Refuses before the work what could not be written after it, by the names of the options.

    Raises `ConfigError`.
    """
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"--{option} {path}: is a folder; give another path, of a file")
        if not path.parent.is_dir():
            raise ConfigError(
                f"--{option} {path}: there is no folder {path.parent}; make it, or give another "
                "path"
            )
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ConfigError(
                f"--{option} {path}: {path.parent} cannot be written to ({error.strerror}); give "
                "another path"
            ) from error
