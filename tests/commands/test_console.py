"""How errors of the user's are told."""

from __future__ import annotations

import io

import pytest
import typer
from rich.console import Console

from merakc.commands.console import NO, UNUSABLE, told
from merakc.errors import ConfigError, FitError


def test_an_error_is_one_message_and_an_exit_code() -> None:
    page = io.StringIO()
    with pytest.raises(typer.Exit) as caught, told(Console(file=page, width=80)):
        raise ConfigError("dp is 0 [sic]; a degree is at least 1")
    assert caught.value.exit_code == UNUSABLE
    assert page.getvalue() == "ConfigError: dp is 0 [sic]; a degree is at least 1\n"


def test_what_fits_nowhere_is_an_answer() -> None:
    with pytest.raises(typer.Exit) as caught, told(Console(file=io.StringIO())):
        raise FitError("nothing fits")
    assert caught.value.exit_code == NO


def test_what_is_no_fault_of_the_users_stays() -> None:
    with pytest.raises(ZeroDivisionError), told(Console(file=io.StringIO())):
        raise ZeroDivisionError


def test_a_file_that_cannot_be_written_is_told() -> None:
    page = io.StringIO()
    with pytest.raises(typer.Exit), told(Console(file=page, width=80)):
        raise PermissionError(13, "Permission denied", "plan.json")
    assert "Permission denied: 'plan.json'; give another path" in page.getvalue()
