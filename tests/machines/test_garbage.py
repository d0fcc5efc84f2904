from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from merakc.machines.garbage import NEW_OBJECTS, _Seen, few_collections


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing was frozen yet."""
    monkeypatch.setattr(_Seen, "frozen", False)
    monkeypatch.setattr(_Seen, "ours", False)


@pytest.mark.parametrize("own", [(700, 10, 10), (0, 10, 10), (NEW_OBJECTS * 2, 10, 10)])
def test_garbage_is_looked_for_rarely_and_then_as_before(
    own: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    before = gc.get_threshold()
    request.addfinalizer(lambda: gc.set_threshold(*before))
    gc.set_threshold(*own)
    found: list[int] = []

    def fail() -> None:
        with few_collections():
            found.append(gc.get_threshold()[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert found == [NEW_OBJECTS if own[0] == 700 else own[0]]
    assert gc.get_threshold() == own


def test_what_is_there_before_is_not_looked_through(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(gc.freeze)  # as it was
    gc.unfreeze()
    with few_collections():
        frozen = gc.get_freeze_count()
        assert frozen
        made: list[list[int]] = [[] for _ in range(1000)]
        with few_collections():  # nor what was made so far
            assert gc.get_freeze_count() > frozen + len(made)
        assert gc.get_freeze_count() > frozen
    assert not gc.get_freeze_count()


def test_what_a_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with few_collections():
        pass
    assert gc.get_freeze_count()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_is_counted_no_more_than_it_must(
    frozen: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it was some; and never inside of what has frozen it itself."""
    request.addfinalizer(gc.freeze)  # as it was
    (gc.freeze if frozen else gc.unfreeze)()
    counted: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    for _ in range(3):
        with few_collections(), few_collections():
            pass
    assert [bool(x) for x in counted] == ([True] if frozen else [False] * 3)


def test_importing_merakc_leaves_python_as_it_was() -> None:
    code = (
        "import gc; before = gc.get_threshold(); import merakc; assert before == gc.get_threshold()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_process_may_end_without_a_last_search(leaves: bool) -> None:
    code = f"""
import gc
from merakc.machines.garbage import leave_garbage

class Circle:
    def __del__(self): print("told")

if {leaves}:
    leave_garbage()
gc.disable()
one = Circle()
one.own = one
del one
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == ("" if leaves else "told\n")
