"""What users are told while a job begins: what is being done, on rank 0's standard error; what was
decided; what is done otherwise than they may expect.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist
from rich.progress import Progress

from merakc.errors import MerakWarning
from merakc.frontend.regions import WHY as DYNAMIC
from merakc.frontend.source import INSTALLED, near_line
from merakc.ir.batches import PER_MICRO_BATCH
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.passes.batches.recorded import BatchRecording
from merakc.report.decisions import plan_facts
from merakc.report.terminal import QUIET, Terminal, changing_line

# The share of the forward's arithmetic from which on it matters that a part runs as it is.
WORTH_TELLING = 0.01
_OURS = f"{__file__.rpartition('/train/')[0]}/"
STEPS = ("recording the forward", "choosing a plan", "compiling the stages", "measuring a step")
EVERY_S = 5.0  # between two lines where there is no terminal


class Teller:
    """Says what is being done: in a line that changes on a terminal, elsewhere in one every few
    seconds.
    """

    def __init__(self, terminal: Terminal | None) -> None:
        self.terminal = terminal
        self.start_s = self.last_s = time.monotonic()
        self.at = 0
        self.live: Progress | None = None
        self.notes: dict[str, str] = {}
        if terminal is not None and terminal.is_terminal:
            self.live = changing_line(terminal, self._text(""))
            self.live.start()

    def begin(self, step: str) -> None:
        """A step of `STEPS` begins."""
        self.at = STEPS.index(step)
        self.tell("")

    def tell(self, detail: str) -> None:
        """What is being done in this step."""
        text = self._text(detail)
        now_s = time.monotonic()
        if self.live is not None:
            self.live.update(self.live.task_ids[0], description=text)
        elif self.terminal is not None and now_s - self.last_s >= EVERY_S:
            self.last_s = now_s
            self._line(f"{text}, after {now_s - self.start_s:.0f} s")

    def decided(self, file: PlanFile) -> None:
        """What the plan decides and expects, and what was noted."""
        if self.terminal is None:
            return
        self.close()
        took_s = time.monotonic() - self.start_s
        self._line(f"merakc: {file.decisions.model} is ready after {took_s:.1f} s")
        for name, text in (*plan_facts(file), *self.notes.items()):
            self._line(f"  {name}: {text}")

    def close(self) -> None:
        """Ends the line that changes."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _text(self, detail: str) -> str:
        text = f"merakc: {STEPS[self.at]} ({self.at + 1} of {len(STEPS)})"
        return f"{text}: {detail}" if detail else text

    def _line(self, text: str) -> None:
        assert self.terminal is not None
        self.terminal.print(text, soft_wrap=True)


_now: ContextVar[Teller] = ContextVar("teller", default=Teller(None))  # noqa: B039


@contextmanager
def telling() -> Iterator[Teller]:
    """Tells on rank 0 what happens inside."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    speaks = is_first and not os.environ.get(QUIET)
    teller = Teller(Terminal(stderr=True, highlight=False) if speaks else None)
    before = _now.set(teller)
    try:
        yield teller
    finally:
        teller.close()
        _now.reset(before)


def begin(step: str) -> None:
    """A step of what is being told begins."""
    _now.get().begin(step)


def tell(detail: str) -> None:
    """Says more of the step that has begun."""
    _now.get().tell(detail)


def note(name: str, text: str) -> None:
    """Says something beside what the plan decides."""
    _now.get().notes[name] = text


def warn_of(plan: Plan, recording: BatchRecording, *, outside: bool = False) -> None:
    """Warns of modules that run as they are, of what steps leave out, of conventions that were
    asked for, and of a plan that was made before the loss was known, which is made `outside`.
    """
    if outside:
        warn_of_line(
            f"the forward of {recording.model_name} returns no loss for this batch: the plan is "
            "made for the mean of its outputs, and the loss is what calls loss.backward()"
            "; auto_parallel(model, batch, loss=fn) plans with it, and trains at any dp"
        )
    _warn_of_opaque(plan)
    _warn_of_unheard(recording)
    if plan.couplings == PER_MICRO_BATCH:
        for line in plan.conventions:
            warn_of_line(f"by convention: {line}")


def warn_of_shapes(many: int, most: int) -> None:
    """Says, of the user's own line, that a model has been compiled for many shapes."""
    warn_of_line(
        f"merakc has compiled this model for {many} shapes of batch, numbers in them, modes or "
        f"attributes, and keeps {most}; pad batches to fewer"
    )


def warn_of_more() -> None:
    """Says, of the user's own line, that one call takes two steps."""
    warn_of_line(
        "a loss is made of outputs of a call of which a step is taken already, for its own loss or "
        "another one: one more is taken, of as long; add the losses up before backward(), and "
        "leave labels out or give auto_parallel the whole loss (loss=fn), and one is enough"
    )


def warn_of_same() -> None:
    """Says, of the user's own line, that all dp ranks train on the same samples."""
    warn_of_line(
        "all data-parallel ranks were given the same batches in several steps: they train on the "
        "same samples, as one of them would; merakc.dataloader(data, model, batch_size) deals them "
        "out, and model.read_whole_batches() takes each rank's part of a batch that all read"
    )


def warn_of_line(text: str) -> None:
    """Warns, of the user's own line, if it is no library's that calls."""
    name, _, line = near_line(sys._getframe(1), _OURS).rpartition(":")
    warnings.warn_explicit(text, MerakWarning, name or "merakc", int(line or 0))


def _warn_of_opaque(plan: Plan) -> None:
    """Says once for each module what runs as it is, where that is more than a sum over a mask."""
    for module in plan.opaque_modules:
        where = f"module '{module.name}'" if module.name else "the model's own forward"
        if module.reason == DYNAMIC:
            where = f"a part of {where}"
            if module.flops_share < WORTH_TELLING:
                continue
        warn_of_line(
            f"{where} cannot be recorded and runs as it is, whole on one stage and "
            f"on each of {plan.lanes} ranks of {plan.form.axes}: {module.reason}, at "
            f"{module.source}. It is {module.flops_share:.0%} of the forward's arithmetic, and its "
            "forward runs again in the backward"
        )


def _warn_of_unheard(recording: BatchRecording) -> None:
    """Says what steps do not do that code of the user's own does beside computing."""
    for told in recording.aside.unheard:
        if not told.rpartition(", at ")[2].startswith(INSTALLED):
            warn_of_line(told)
