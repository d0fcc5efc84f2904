"""What a terminal shows of an error that ends a rank: what it says, and the user's own lines."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

from merakc.errors import NOT_THEIRS, MerakError

# Names the folder in which ranks of `merakc launch` tell that they end an interruption themselves.
ENDING = "MERAKC_ENDING"
WHOLE = "MERAKC_TRACEBACK"  # set to 1, all lines are shown


@cache
def show_errors_short() -> None:
    """From here on errors of merakc's are shown without its own lines, and an interruption (Ctrl-C)
    as one line on rank 0. All other errors are shown as before.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(WHOLE) == "1":
            before(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write("interrupted: all ranks end\n")
            if not hasattr(sys, "ps1"):  # where somebody types, the process goes on
                atexit.register(_end)
        elif isinstance(error, MerakError):
            sys.stderr.write(f"{shortened(error)}\n")
        else:
            before(kind, error, trace)

    sys.excepthook = hook
    if ENDING in os.environ:
        with suppress(OSError):
            Path(os.environ[ENDING], str(os.getpid())).touch()


def _end() -> None:
    """Ends an interrupted process as the signal would, once all that is to run at exit has: what
    Python takes apart behind that, graphs and modules, takes seconds where ranks share cores.
    """
    atexit.unregister(_end)
    gc.freeze()  # exit functions that collect garbage find none
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def shortened(error: BaseException) -> str:
    """An error, its causes, and of their lines those of the user's own code."""
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        theirs = [frame for frame in part.stack if not frame.filename.startswith(NOT_THEIRS)]
        part.stack = traceback.StackSummary.from_list(theirs)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(told.format()).rstrip()
