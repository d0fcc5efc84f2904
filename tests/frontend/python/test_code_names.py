"""The names that code goes by."""

from __future__ import annotations

import dis
import sys
from types import FunctionType

from merakc.frontend.python.code_names import GLOBALS, IMPORT, is_installed, named, names_in


def test_names_in_code_are_those_that_dis_tells() -> None:
    """Of all of torch's modules and our own that are there; some have more than 256 names."""
    kinds = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
    codes = [
        f.__code__
        for name, module in [*sys.modules.items()] if name.startswith(("torch.", "merakc."))
        for f in vars(module).values() if type(f) is FunctionType
    ]  # fmt: skip
    many = compile("\n".join(f"a{k} = b{k}\nimport c{k}" for k in range(300)), "", "exec")
    for code in [many, *codes[::5]]:
        told = list(dis.get_instructions(code))
        assert named(code, GLOBALS) == [i.argval for i in told if i.opname in kinds]
        imports = [i.argval for i in told if i.opname == "IMPORT_NAME"]
        assert named(code, {IMPORT}) == imports
    assert len(named(many, GLOBALS)) == len(named(many, {IMPORT})) == 300
    assert len(codes) > 1000


def test_code_within_code() -> None:
    def outer() -> object:
        return [getattr(sys, "maxsize", None) for _ in dis.opmap]

    every, read, imports = names_in(outer.__code__)
    assert {"sys", "dis", "opmap", "maxsize", "getattr"} <= set(every)
    assert {"sys", "dis", "getattr"} <= set(read)
    assert not imports


def test_libraries() -> None:
    assert is_installed("torch")
    assert is_installed("sys")
    assert is_installed("json")
    assert not is_installed(__name__)
