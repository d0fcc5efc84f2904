"""The errors that merakc raises for its users. Broken invariants of our own are `assert`s."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import PurePath

from merakc.files.printable import printable

STDLIB = sysconfig.get_path("stdlib")
# Where installed packages lie: this environment's, and those that it sees of others.
LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
    *(path for path in sys.path if PurePath(path).name in ("site-packages", "dist-packages")),
)
# Where code lies that is not the user's: installed packages, Python's own, and this one.
NOT_THEIRS = (
    *LIBRARIES,
    STDLIB,
    __file__.rpartition("/")[0],
    "<",
)


class MerakError(Exception):
    """Base of every error that a user can cause and mend.

    Its message may quote a file, and ends in a terminal: nothing in it steers that.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class RecordError(MerakError):
    """The model's forward could not be recorded as one graph."""


class ForwardError(RecordError):
    """An error of the model's own, raised by its forward; the cause is that error."""


class OtherSizeError(RecordError):
    """A forward that takes the batch that is given, and none of another number of samples."""


class ShardError(MerakError):
    """A tensor-parallel degree that the model's graph does not allow."""


class RuleError(MerakError):
    """A sharding rule that is malformed, or does not fit its op."""


class CutError(MerakError):
    """A number of pipeline stages that the graph cannot give."""


class PlanError(MerakError):
    """A plan that is damaged, edited, of another schema or of another model."""


class FitError(MerakError):
    """A job of which no layout fits the memory of the devices."""


class ProgramError(MerakError):
    """An order of actions that would deadlock, lose a message or use a freed buffer."""


class ConfigError(MerakError):
    """Arguments that contradict each other, the batch or the number of ranks."""


class ClusterError(MerakError):
    """A cluster file that is malformed, or says what no cluster can be."""


class LedgerError(MerakError):
    """A ledger that is cut off, edited, of another version or of another plan."""


class CheckpointError(MerakError):
    """A checkpoint that is damaged or does not fit, or a folder that cannot be written."""


class CalibrationError(MerakError):
    """A machine that cannot be measured, or ledgers that tell nothing of its model's errors."""


class MismatchError(MerakError):
    """Ranks that do not hold the same model, plan or versions."""


class NonfiniteError(MerakError):
    """A step whose loss or gradients are not finite, on any rank."""


class StuckError(MerakError):
    """A rank that waited for others, of which one is lost, has stopped or does not come."""


class MerakWarning(UserWarning):
    """Something that works, at a cost that the user should know of."""

    def __str__(self) -> str:
        return printable(super().__str__())


def failure(error: BaseException) -> str:
    """An exception of the user's code in one line: its kind, what it says, and where it is from."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(NOT_THEIRS)]
    place = f", at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
    return (f"{kind}: {text}" if text else kind) + place
