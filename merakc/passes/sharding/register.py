"""Sharding rules of users' ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from merakc.errors import RuleError
from merakc.frontend.calls.normalise import decomposes
from merakc.passes.sharding.notation import parse_row
from merakc.passes.sharding.rules import add_row, row_of


def register_sharding(op: Any, rule: str) -> None:
    """Tells merakc how an op of yours splits over tensor-parallel ranks.

    `op` is an `OpOverload`, what `torch.library.custom_op` returns, or a name ("mylib::scale",
    "mylib::scale.overload"). `rule` names the dims of its tensor arguments and outputs, like an
    einsum:

        merakc.register_sharding("mylib::expert", "t d, d f! -> t f")

    - A dim may be split wherever its letter stands: the op on a rank's parts must give that rank's
      part of the result. It must take sizes from its tensors, not from numbers among its arguments.
    - A letter that no output has is summed: each rank's result is a partial sum, and they are added
      up. `d!` keeps the dim whole instead, as does any dim that the op needs all of.
    - `...` stands for leading dims, `?` before an argument says that it may be None, and a dim of
      size 1 broadcasts.

    Other rules are "pointwise"; "along(dim)", for an op that needs whole the dim which its argument
    `dim` names; "last(2)", for one that needs its last two dims whole; and "whole(why)".

    Gradients follow from the op's own autograd formula. Call it on every rank before
    `auto_parallel`. Raises `RuleError` for an unknown op, a rule that is malformed or does not fit
    the op's schema, and an op that has another rule.
    """
    overload = _overload(op)
    name = str(overload)
    if decomposes(overload):
        raise RuleError(f"{name} is recorded as the ops that it is made of: it needs no rule")
    row = parse_row(rule, overload._schema)
    before = row_of(name)
    if before not in (None, row):
        raise RuleError(f"{name} has a sharding rule, {before!r}, and cannot be given {row!r}")
    add_row(name, row)


def _overload(op: Any) -> Any:
    """The op that a user means."""
    found = getattr(op, "_opoverload", op)  # of what torch.library.custom_op returns
    if isinstance(found, str):
        namespace, _, name = found.replace("::", ".").partition(".")
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None) if packet else None
        if found is not None and overload:
            found = getattr(found, overload, None)
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads: list[str] = found.overloads()  # type: ignore[no-untyped-call]
        if len(overloads) > 1 and "default" not in overloads:
            names = ", ".join(overloads)
            raise RuleError(f"{op} has overloads ({names}): name one, as in '{op}.{overloads[0]}'")
        found = getattr(found, "default" if "default" in overloads else overloads[0])
    if not isinstance(found, OpOverload):
        raise RuleError(
            f"no op {op!r}: give 'namespace::name' after the library that defines it is imported"
        )
    return found
