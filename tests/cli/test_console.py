"""How errors of the user's are told."""

from __future__ import annotations

import io
import signal
import warnings
from pathlib import Path

import pytest
import typer
from rich.console import Console

from merakc.cli.console import (
    EVERY_S,
    NO,
    UNUSABLE,
    check_outputs,
    ending_after,
    load_of,
    progress_console,
    told,
    working,
)
from merakc.errors import ConfigError, FitError, MerakWarning
from merakc.report.terminal import QUIET


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


def test_in_a_pipe_an_error_is_one_line_and_nothing_in_it_is_markup() -> None:
    page = io.StringIO()
    text = "h100:-1 [b] is :x: of " + "many words " * 20
    with pytest.raises(typer.Exit), told(Console(file=page, width=80)):
        raise ConfigError(text)
    assert page.getvalue() == f"ConfigError: {text}\n"


@pytest.mark.filterwarnings("always")
def test_warnings_of_ours_are_a_line() -> None:
    page, before = io.StringIO(), warnings.showwarning
    with told(Console(file=page, width=80)):
        warnings.warn("it is slow", MerakWarning, stacklevel=1)
    assert page.getvalue() == "MerakWarning: it is slow\n"
    assert warnings.showwarning is before


def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    check_outputs(csv=None, output=tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"--html .*: is a folder"):
        check_outputs(html=tmp_path)
    with pytest.raises(ConfigError, match=r"--output .*no/plan.json: there is no folder .*no; "):
        check_outputs(output=tmp_path / "no" / "plan.json")
    with pytest.raises(ConfigError, match=r"--output /proc/a.json: /proc cannot be written to"):
        check_outputs(output=Path("/proc/a.json"))  # not by root either


def test_names_are_no_markup_in_what_is_being_done(capsys: pytest.CaptureFixture[str]) -> None:
    console = progress_console()
    with working(console, "reading [/x]") as tell:  # as markup it would raise
        tell("planning [/y]")
    console.print("written to [a] :x:.json")
    assert "written to [a] :x:.json" in capsys.readouterr().err


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.delenv(QUIET)
    page = io.StringIO()
    with working(Console(file=page, width=80), "reading") as tell:
        for waited_s, text in ((1.0, "one"), (EVERY_S, "two"), (1.0, "three"), (EVERY_S, "four")):
            now_s += waited_s
            tell(text)
    assert page.getvalue() == "two, after 11 s\nfour, after 22 s\n"


def test_a_limit_is_a_ctrl_c_and_leaves_no_alarm() -> None:
    with pytest.raises(KeyboardInterrupt), ending_after(0.01):
        signal.pause()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with ending_after(None):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_tokens_by_expert_are_numbers_or_a_file_of_them(tmp_path: Path) -> None:
    (file := tmp_path / "load.json").write_text("[4, 2.5]\n")
    assert load_of("4,2.5") == load_of(str(file)) == (4.0, 2.5)
    assert load_of(None) == ()
    with pytest.raises(ConfigError, match="--expert-load 4;2: give how many tokens each expert"):
        load_of("4;2")
