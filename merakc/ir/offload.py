"""What of a rank's tensors may live on the host, beside its device: how users and plans say it."""

from __future__ import annotations

from dataclasses import dataclass

from merakc.errors import ConfigError
from merakc.ir.recompute import parse_budget
from merakc.ir.state import AUTO

NONE = "none"
# What can be moved: the optimizer's state of a parameter, with the copy that it updates; what a
# forward keeps for its backward.
OPTIMIZER, ACTIVATIONS = "optimizer", "activations"
KINDS = (ACTIVATIONS, OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Offload:
    """What a user asks for: `kinds` of tensors of which a rank may move `size_bytes` to its host,
    without a number all. With `as_needed` it moves no more than what its device has no room for.
    """

    kinds: tuple[str, ...] = ()
    size_bytes: int | None = None
    as_needed: bool = False

    def may(self, kind: str) -> bool:
        """Whether tensors of this kind may live on the host."""
        return kind in self.kinds


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
    return Offload(tuple(sorted(kinds)) or KINDS, sizes[0] if sizes else None)


def _unknown(text: str) -> ConfigError:
    return ConfigError(
        f"offload {text!r} is not known; choose {NONE}, {AUTO}, one or more of {', '.join(KINDS)}, "
        "how much a rank may move ('4 GiB'), or both ('optimizer, 4 GiB')"
    )


def offload_text(kinds: set[str]) -> str:
    """How a plan says which kinds it moves."""
    return ", ".join(sorted(kinds)) or NONE
