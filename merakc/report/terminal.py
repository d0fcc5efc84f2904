"""The terminal that everything is printed to: nothing in a name or a text can steer it. The line
that says there what is being done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from merakc.files.printable import printable

QUIET = "MERAKC_QUIET"  # in the environment: nothing is said of what is being done


class Terminal(Console):
    """A console of `rich` on which texts are neither markup nor escape sequences."""

    def __init__(
        self, *, stderr: bool = False, highlight: bool = True, file: TextIO | None = None,
        width: int | None = None,
    ) -> None:  # fmt: skip
        """On standard output or error, or a `file`, which is text without colours."""
        super().__init__(
            stderr=stderr, highlight=highlight, markup=False, emoji=False, file=file, width=width,
            color_system="auto" if file is None else None, legacy_windows=False,
        )  # fmt: skip

    def on_broken_pipe(self) -> None:
        """Ends the process in silence where nobody reads on, with the code of a shell for that."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what is left in buffers is written at the end
            os.dup2(nowhere, stream)
        raise SystemExit(128 + signal.SIGPIPE)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of what is printed; those of text hold no control characters."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


class _Doing(ProgressColumn):
    """What is being done. Where the line is too narrow it is cut, and not the time behind it."""

    def render(self, task: Task) -> Text:
        """The text, in one line."""
        return Text(task.description, no_wrap=True, overflow="ellipsis")


def changing_line(console: Console, text: str) -> Progress:
    """A line of a terminal that says what is being done, `text` first, and for how long. It is
    shown between `start` and `stop`; `update` of its only task, by its `description`, changes it.
    """
    spinner, time = (Column(no_wrap=True) for _ in range(2))
    line = Progress(
        SpinnerColumn(table_column=spinner), _Doing(), TimeElapsedColumn(table_column=time),
        console=console, transient=True, refresh_per_second=4,
    )  # fmt: skip
    line.add_task(text)
    return line
