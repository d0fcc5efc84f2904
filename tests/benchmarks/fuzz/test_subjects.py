"""What a file says and what is read of it."""

from __future__ import annotations

import json

from benchmarks.fuzz.subjects import _cluster_said, _differences, _signed_lines
from merakc.machines.cluster_files import cluster_text, preset


def test_differences_but_for_defaults() -> None:
    assert not list(_differences({"a": 1, "b": []}, {"a": 1.0, "c": 2}, "x"))
    assert list(_differences({"a": 1}, {}, "x")) == ["x.a is passed over"]
    assert list(_differences({"a": "1"}, {"a": 1}, "x")) == ["x.a says '1' and is '1'"]


def test_devices_are_under_their_own_names() -> None:
    text = cluster_text(preset("h100"))
    said = _cluster_said(text.replace("[devices.", "[devices.", 1))
    assert said["nodes"][0]["device"] in said["devices"]


def test_lines_are_signed_as_far_as_they_can_be() -> None:
    first, second, third = _signed_lines([b'{"a": 1, "digest": "x"}', b"[1", b'{"b": 2}'])
    assert json.loads(first)["digest"] != json.loads(third)["digest"]
    assert second == b"[1"
