"""Calls with which a model talks to other processes by itself: nothing a compiled step can hold."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from merakc.errors import RecordError
from merakc.frontend.replaced import in_this_thread, replaced
from merakc.frontend.source import near_line, user_line

# What launchers say of the number of ranks in a rank's environment.
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
# Of torch.distributed's calls, its functional ones, and memory that processes share.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")


def check_call(func: Any) -> None:
    """Raises `RecordError` where a call is a message to other processes.

    Ranks run parts of the model, and other parts: they would wait for each other for ever.
    """
    if func.namespace in _NAMESPACES:
        raise _refused(str(func))


def _refused(call: str) -> RecordError:
    return RecordError(
        f"{user_line()}: the forward communicates by itself ({call}), and merakc decides which "
        "rank runs what; take the call out: the loss is that of the batch of all ranks as it is"
    )


@contextlib.contextmanager
def no_objects_sent() -> Iterator[None]:
    """Refuses to send objects: torch makes bytes of them first, which recorded tensors have not."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refused("objects are sent")

    with replaced(distributed_c10d, "_object_to_tensor", refuse):
        yield


@contextlib.contextmanager
def number_of_ranks_unknown() -> Iterator[None]:
    """Refuses to say of how many ranks a group is: the model is that of one process."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _refused("it asks for the number of ranks")

    def look(environment: Any, name: Any) -> Any:
        found = read(environment, name)
        if name in _SIZES and found != "1" and near_line(sys._getframe(1)):
            refuse()
        return found

    known, read = distributed_c10d._get_group_size, os._Environ.__getitem__
    with (
        replaced(distributed_c10d, "_get_group_size", in_this_thread(refuse, known)),
        replaced(os._Environ, "__getitem__", look),
    ):
        yield


class Silence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, `check_call` is asked about all calls."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_call(func)
        return func(*args, **(kwargs or {}))
