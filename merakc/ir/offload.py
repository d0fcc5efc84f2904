"""What of a rank's tensors may live on the host, beside its device: how users and plans say it."""

from __future__ import annotations

from dataclasses import dataclass

from merakc.errors import ConfigError
from merakc.ir.recompute import parse_budget
from merakc.ir.state import AUTO

NONE = "none"
# What can be moved: the optimizer's state of a parameter, with the copy that it updates; what a
# forward keeps for its backward; a parameter with all that is kept of it.
OPTIMIZER, ACTIVATIONS, PARAMETERS = "optimizer", "activations", "parameters"
KINDS = (ACTIVATIONS, OPTIMIZER, PARAMETERS)
UNNAMED = (ACTIVATIONS, OPTIMIZER)  # of a size alone


@dataclass(frozen=True, slots=True)
class OnHost:
    """The names of parameters of which something lives on the host: those that are updated there,
    and those that are kept there and come to the device as they are read.

    What is updated there has its gradients there once they are reduced: those of a step of `one`
    micro-batch leave the device as they are made.
    """

    updated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    one: bool = False

    def __bool__(self) -> bool:
        return bool(self.updated or self.kept)


NOWHERE = OnHost()


@dataclass(frozen=True, slots=True)
class Offload:
    """What a user asks for: `kinds` of tensors of which a rank may move `size_bytes` to its host,
    without a number all. With `as_needed` it moves no more than what its device has no room for.
    """

    kinds: tuple[str, ...] = ()
    size_bytes: int | None = None
    as_needed: bool = False

    def may(self, kind: str) -> bool:
        """Whether tensors of this kind may live on the host; parameters that do are updated
        there.
        """
        return kind in self.kinds or (kind == OPTIMIZER and PARAMETERS in self.kinds)

    @property
    def moves_parameters(self) -> bool:
        """Whether parameters are to live there, with room on the device or without."""
        return PARAMETERS in self.kinds and not self.as_needed


def parse_offload(text: str) -> Offload:
    """What a text asks for: "none", "auto" (as needed), names of `KINDS`, a size such as "4 GiB",
    or names and one size, parted by commas.

    Raises `ConfigError` for anything else.
    """
    if text == NONE:
        return Offload()
    if text == AUTO:
        return Offload(KINDS, as_needed=True)
    kinds, sizes = set[str](), list[int]()
    for part in (part.strip() for part in text.split(",")):
        budget = parse_budget(part)
        if part in KINDS:
            kinds.add(part)
        elif budget is not None and budget.size_bytes is not None:
            sizes.append(budget.size_bytes)
        else:
            raise _unknown(text)
    if len(sizes) > 1:
        raise _unknown(text)
    return Offload(tuple(sorted(kinds)) or UNNAMED, sizes[0] if sizes else None)


def _unknown(text: str) -> ConfigError:
    return ConfigError(
        f"offload {text!r} is not known; choose {NONE}, {AUTO}, one or more of {', '.join(KINDS)}, "
        "how much a rank may move ('4 GiB'), or both ('optimizer, 4 GiB')"
    )


def offload_text(kinds: set[str]) -> str:
    """How a plan says which kinds it moves."""
    return ", ".join(sorted(kinds)) or NONE
