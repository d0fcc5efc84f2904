"""A file is as it was, or as it is to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from merakc.files.writing import write_atomically


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, "µ")
    assert path.read_bytes() == "µ".encode()
    path.chmod(0o640)
    write_atomically(str(path), b"other")
    assert path.read_bytes() == b"other"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_new_file_has_the_rights_of_any_other(tmp_path: Path) -> None:
    write_atomically(tmp_path / "one", "")
    (tmp_path / "other").write_text("")
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_was_there_survives_a_failure(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_link_stays_and_a_device_is_written_to(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    write_atomically("/dev/null", "gone")
    assert not Path("/dev/null").is_file()
