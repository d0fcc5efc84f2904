"""Values that leave a device's memory for its host's, and come back.

A copy is started by one call and waited for by another. On a GPU it runs on a stream of its own for
its direction, from or to pinned memory, and what is waited for holds up the stream that computes,
not the host. On a CPU the host is a second pool of its memory, which is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Copies a tensor into another, to the host or (`back`) to the device, behind all that the computing
# has been given so far; calling what it returns holds the computing up until the copy has ended.
Copy = Callable[[Tensor, Tensor, bool], Callable[[], None]]
_copies: dict[str, Copy] = {}  # by kinds of devices whose host only issues work


def bind_copies(kind: str, copy: Copy) -> None:
    """Lets devices of a kind copy so; a second call replaces the first."""
    _copies[kind] = copy


def unbind_copies(kind: str) -> None:
    """Forgets how devices of a kind copy: their host copies by itself, then."""
    _copies.pop(kind, None)


@dataclass(frozen=True, slots=True)
class OnHost:
    """The first elements of a value, in the order of its memory, while they are on the host.

    What is not dense in memory stays where it is: `kept` is all of it then.
    """

    part: Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    device: torch.device
    kept: Tensor | None = None


class Moving:
    """A copy that is under way, which still reads what is `held`."""

    __slots__ = ("_held", "_join", "_made")

    def __init__(self, made: Any, join: Callable[[], None] | None, held: Any = None) -> None:
        self._made, self._join, self._held = made, join, held

    def wait(self) -> Any:
        """What was copied, once it is there."""
        if self._join is not None:
            self._join()
        self._held = None
        return self._made


def start_out(x: Tensor, count: int) -> Moving:
    """Starts to copy the first `count` elements of x to the host."""
    shape, strides = x.shape, x.stride()
    if not _is_dense(x):
        return Moving(OnHost(x, shape, strides, x.device, x), None)
    part = ROOM(x, count)
    join = copy(part, _flat(x)[:count], x.device, back=False)
    return Moving(OnHost(part, shape, strides, x.device), join)


def moved_out(moving: Moving, x: Tensor) -> OnHost:
    """The elements on the host, once they are there: from then on `x` is read no more."""
    del x
    found: OnHost = moving.wait()
    return found


def rest_of(x: Tensor, count: int) -> Tensor:
    """The elements of x behind the first `count`, in memory of their own."""
    return _flat(x)[count:].clone() if _is_dense(x) else x.new_empty(0)


def start_back(host: OnHost, rest: Tensor | None = None) -> Moving:
    """Starts to copy a value back to the device: its elements on the host, and the `rest`."""
    if host.kept is not None:
        return Moving(host.kept, None)
    made = torch.empty_strided(host.shape, host.strides, dtype=host.part.dtype, device=host.device)
    flat, count = _flat(made), host.part.numel()
    join = copy(flat[:count], host.part, host.device, back=True)
    if rest is not None:
        flat[count:].copy_(rest)
    return Moving(made, join, host)


def copy(
    target: Tensor, source: Tensor, device: torch.device, *, back: bool
) -> Callable[[], None] | None:
    """Starts to copy between a device and its host; what it returns holds the computing up until
    that has ended. None where it has.
    """
    issue = _copies.get(device.type)
    if issue is not None:
        return issue(target, source, back)
    target.copy_(source)
    return None


def _is_dense(x: Tensor) -> bool:
    """Whether its elements fill its memory without gaps, each once."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return x.as_strided((x.numel(),), (1,))


def _room(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


# An op, so that what counts the bytes of calls knows those of the host.
torch.library.define("merakc::host_room", "(Tensor like, int count) -> Tensor")
torch.library.impl("merakc::host_room", "default", _room)
torch.library.register_fake(
    "merakc::host_room",
    lambda like, count: torch.empty(count, dtype=like.dtype, device="cpu"),
)
ROOM = torch.ops.merakc.host_room.default
