"""Files are read whole, bounded and strictly, or not at all."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from merakc.files.reading import (
    MOST_DEPTH,
    check_depth,
    decompressed,
    misread,
    parse_json,
    read_text,
)


def test_what_json_says_is_read() -> None:
    assert parse_json('{"a": [1, -2.5, null, true, "x"], "b": {"a": -1}, "c": Infinity}') == {
        "a": [1, -2.5, None, True, "x"],
        "b": {"a": -1},
        "c": float("inf"),
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "b": 2, "a": 1}', "key 'a' stands there twice"),
        ('[{"x": {"a": 1, "a": 2}}]', "key 'a' stands there twice"),
        ('{"a": NaN}', "NaN"),
        (f'{{"a": {2**63}}}', "more than 64 bits"),
        (f'{{"a": {"9" * 5000}}}', "more than 64 bits"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested deeper"),
        ("[" * 100_000, "nested deeper"),
        ('{"a": 1', "delimiter"),
        ("", "Expecting value"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_depth_and_numbers_up_to_their_limits_are_read() -> None:
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert parse_json(deep)
    assert parse_json(str(2**63 - 1)) == 2**63 - 1


def test_a_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("µs\n", encoding="utf-8")
    assert read_text(path, 4) == "µs\n"
    with pytest.raises(ValueError, match="larger than 3 bytes"):
        read_text(path, 3)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(path)


def test_what_might_never_end_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match="no regular file"):
            read_text(path)


def test_unpacking_is_bounded() -> None:
    packed = zlib.compress(b"0" * 1000)
    assert decompressed(packed, 1000) == b"0" * 1000
    for bad, most_bytes in ((packed, 999), (packed[:-1], 1000), (b"0" * 9, 1000)):
        with pytest.raises(ValueError, match=r"unpacks to more|header"):
            decompressed(bad, most_bytes)


def test_what_is_read_otherwise_than_it_stands_there() -> None:
    said = {"a": 1, "b": [1.0, {"c": "x"}], "t": True}
    assert not list(misread(said, {"a": 1.0, "b": (1, {"c": "x", "more": 0}), "t": True}, "file"))
    for means, told in (
        ({**said, "a": 2}, "file.a is '1', where int is meant"),
        ({**said, "b": [1.0, {}]}, "file.b[1].c has no meaning"),
        ({**said, "b": [1.0]}, "file.b is"),
        ({**said, "t": 1}, "file.t is 'True', where int is meant"),
    ):
        assert next(misread(said, means, "file")).startswith(told)
    assert list(misread({"n": "1"}, {"n": 1}, "")) == [".n is '1', where int is meant"]


def test_depth_is_bounded() -> None:
    deep: list[object] = []
    for _ in range(MOST_DEPTH + 1):
        deep = [deep]
    with pytest.raises(ValueError, match="nested deeper"):
        check_depth(deep)
