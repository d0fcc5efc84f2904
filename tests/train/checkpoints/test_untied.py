from __future__ import annotations

from typing import Any

import torch

from merakc.train.checkpoints.manifest import Manifest, Stored
from merakc.train.checkpoints.untied import tied_names, untied


def manifest(**run: Any) -> Manifest:
    stored = Stored(file="one", dtype="float32", shape=(2,))
    names = ("model/a.w", "model/b", "optimizer/state.a.w.step", "optimizer/state.b.step")
    return Manifest(merakc="", tensors=dict.fromkeys(names, stored), run=run)


def test_copies_are_known_by_the_names_of_the_model() -> None:
    group = {"options": {"lr": 0.1}, "names": ["a.w", "b"]}
    record = {"kind": "SGD", "groups": [group], "scalars": {"a.w": {"count": 3}}}
    given = manifest(tied={"c.w": "a.w", "d": "b"}, optimizers=[record])
    found, copies = untied(given, {"a.w", "b", "c.w"})
    assert copies == {
        "model/c.w": "model/a.w", "optimizer/state.c.w.step": "optimizer/state.a.w.step",
    }  # fmt: skip
    assert found.tensors.keys() == given.tensors.keys() | copies.keys()
    assert found.tensors["model/c.w"].torch_dtype == torch.float32
    (own,) = found.run["optimizers"]
    assert own["groups"][0] == {"options": {"lr": 0.1}, "names": ["a.w", "c.w", "b"]}
    assert own["scalars"] == {"a.w": {"count": 3}, "c.w": {"count": 3}}
    assert given.run["optimizers"] == [record]


def test_nothing_is_copied_where_nothing_was_tied() -> None:
    assert tied_names(manifest(), {"a.w", "c.w"}) == {}
    assert tied_names(manifest(tied={"c.w": "a.w"}), {"a.w", "b"}) == {}
    assert untied(manifest(), {"c.w"}) == (manifest(optimizers=[]), {})
