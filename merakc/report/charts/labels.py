"""What an event's label, the text form of its action, says."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPUTE = re.compile(r"(\d+)([FBIWR])(\d+)")
_MESSAGE = re.compile(r"(send|recv) \d+([FB])(\d+) (.+) (?:->|<-) (\d+)")


@dataclass(frozen=True, slots=True)
class ComputeLabel:
    """`2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    letter: str
    micro_batch: int


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """`send 2F0 add_7 -> 3`: what travels, `F0 add_7`, and the rank at the other end."""

    is_send: bool
    content: str
    peer: int


def parse_label(label: str) -> ComputeLabel | MessageLabel | None:
    """The parts of a label; None for a reduction's and for any other text."""
    if match := _COMPUTE.fullmatch(label):
        return ComputeLabel(int(match[1]), match[2], int(match[3]))
    if match := _MESSAGE.fullmatch(label):
        content = f"{match[2]}{match[3]} {match[4]}"
        return MessageLabel(match[1] == "send", content, int(match[5]))
    return None
