"""The names that code goes by."""

from __future__ import annotations

import dis
import sys
from collections.abc import Container
from functools import cache
from itertools import chain
from types import CodeType

from merakc.frontend.source import INSTALLED

ASKING = frozenset(("getattr", "hasattr", "globals", "vars"))  # by a name that is a text
IMPORT = dis.opmap["IMPORT_NAME"]
_FLAGGED = dis.opmap["LOAD_GLOBAL"]  # whose argument holds another bit, since Python 3.11
GLOBALS = frozenset(
    dis.opmap[name] for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
)


@cache
def names_in(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What some code, and the code in it, has by names: all that it looks up, of attributes too
    (`helpers.mask`, `getattr(helpers, "mask", None)`), the globals that it reads or writes, the
    modules that it imports as it runs.
    """
    ops = code.co_code[::2]
    asks = not ASKING.isdisjoint(code.co_names)
    asked = [x for x in code.co_consts if asks and isinstance(x, str) and x.isidentifier()]
    own = (
        (*code.co_names, *asked),
        [*(named(code, GLOBALS) if not GLOBALS.isdisjoint(ops) else ()), *asked],
        named(code, {IMPORT}) if IMPORT in ops else (),  # in few functions
    )
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    every, read, imported = (
        tuple(dict.fromkeys(chain(*parts))) for parts in zip(own, *inner, strict=True)
    )
    return every, read, imported


def named(code: CodeType, ops: Container[int]) -> list[str]:
    """The names that instructions of some kinds go by, as `dis` says, in a fifth of its time."""
    found, extended = [], 0
    for op, arg in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        arg |= extended << 8
        extended = arg if op == dis.EXTENDED_ARG else 0
        if op in ops:
            found.append(code.co_names[arg >> 1 if op == _FLAGGED else arg])
    return found


@cache
def is_installed(module: str) -> bool:
    """Whether a module is a library's, Python's own, or ours."""
    file, ours = (
        getattr(sys.modules.get(module), "__file__", None),
        f"{module}.".startswith("merakc."),
    )
    return ours or module in sys.builtin_module_names or str(file).startswith(INSTALLED)
