"""Texts of what lives on the host."""

from __future__ import annotations

import pytest

from merakc.errors import ConfigError
from merakc.ir.offload import (
    ACTIVATIONS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    Offload,
    offload_text,
    parse_offload,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", Offload()),
        ("auto", Offload(KINDS, as_needed=True)),
        ("optimizer", Offload((OPTIMIZER,))),
        ("optimizer, activations", Offload((ACTIVATIONS, OPTIMIZER))),
        ("4 GiB", Offload((ACTIVATIONS, OPTIMIZER), 4 << 30)),
        ("2mb,optimizer", Offload((OPTIMIZER,), 2_000_000)),
    ],
)
def test_what_is_asked_for(text: str, found: Offload) -> None:
    assert parse_offload(text) == found
    assert {kind for kind in KINDS if found.may(kind)} == set(found.kinds)


def test_parameters_that_live_there_are_updated_there() -> None:
    found = parse_offload("parameters, 4 GiB")
    assert found == Offload((PARAMETERS,), 4 << 30)
    assert found.moves_parameters
    assert [found.may(kind) for kind in KINDS] == [False, True, True]
    assert not parse_offload("auto").moves_parameters


@pytest.mark.parametrize(
    "text", ["", "all", "0.5", "4", "0 GiB", "1 GiB, 2 GiB", "auto, 1 GiB", "optimizer,", "-1 GiB"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not known; choose none, auto, .*'4 GiB'"):
        parse_offload(text)


def test_plans_say_kinds_in_one_way() -> None:
    assert offload_text(set()) == "none"
    assert offload_text({OPTIMIZER, ACTIVATIONS}) == "activations, optimizer"
