"""A checkpoint of tied parameters, as one of a model in which each of them is its own."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from merakc.train.checkpoints.manifest import OPTIMIZER, WEIGHTS, Manifest, stored_name


def tied_names(manifest: Manifest, names: Set[str]) -> dict[str, str]:
    """The names of a model that were tied to others when it was saved, and to which."""
    saved = {stored_name(n) for n in manifest.tensors if n.startswith(WEIGHTS)}
    return {n: of for n, of in manifest.run.get("tied", {}).items() if n in names - saved}


def untied(manifest: Manifest, names: Set[str]) -> tuple[Manifest, dict[str, str]]:
    """The manifest with tensors of a model's own for names that were tied to others, and groups and
    state of optimizers for them; and which tensor of the files each of those is.
    """
    copies_of: dict[str, list[str]] = {}
    for name, of in tied_names(manifest, names).items():
        copies_of.setdefault(of, []).append(name)
    copies: dict[str, str] = {}
    for full in manifest.tensors:
        own = stored_name(full)
        if full.startswith(WEIGHTS):
            copies |= {WEIGHTS + name: full for name in copies_of.get(own, ())}
        elif full.startswith(OPTIMIZER):
            of, _, key = own.removeprefix("state.").rpartition(".")
            copies |= {f"{OPTIMIZER}state.{n}.{key}": full for n in copies_of.get(of, ())}
    optimizers = [_with_copies(record, copies_of) for record in manifest.run.get("optimizers", [])]
    found = manifest.model_copy(update={
        "tensors": manifest.tensors | {n: manifest.tensors[of] for n, of in copies.items()},
        "run": {**manifest.run, "optimizers": optimizers},
    })  # fmt: skip
    return found, copies


def _with_copies(record: Mapping[str, Any], copies_of: Mapping[str, list[str]]) -> dict[str, Any]:
    groups = [
        {**g, "names": [m for n in g["names"] for m in (n, *copies_of.get(n, ()))]}
        for g in record["groups"]
    ]
    scalars = {m: v for n, v in record["scalars"].items() for m in (n, *copies_of.get(n, ()))}
    return {**record, "groups": groups, "scalars": scalars}
