"""Weights in safetensors files, by a model's own names: what `auto_parallel(weights=...)` reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from merakc.errors import CheckpointError
from merakc.files.reading import parse_json, read_text
from merakc.ir.boxes import Box
from merakc.train.checkpoints.converted import Entry, Made, MadeFile, converted
from merakc.train.checkpoints.manifest import (
    NAME,
    WEIGHTS,
    TensorFile,
    check_files,
    read_manifest,
)
from merakc.train.checkpoints.storage import DTYPES

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPE_OF = {text: dtype for dtype, text in DTYPES.items()}


class Weights(Protocol):
    """Tensors by a model's first names, from elsewhere than the model itself."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """What is there, by those names."""

    @property
    def fingerprint(self) -> str:
        """What tells apart those that ranks must have in common."""

    def check(self, share: int, of: int) -> None:
        """Checks a rank's share of them."""

    def read(self) -> Iterator[tuple[str, Callable[[Box], Iterator[torch.Tensor]]]]:
        """Every name, and what reads a box of that tensor as its next rows; on all ranks in one
        order.
        """


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model in files, by the model's first names.

    `doubles` are others that must be equal to them: tied weights that stand there twice.
    """

    place: Path
    tensors: Mapping[str, Entry]
    doubles: Mapping[str, tuple[Entry, ...]]

    @property
    def files(self) -> list[Path]:
        """The files, in the order of their names."""
        return sorted({e.file for e in self.tensors.values()})

    @property
    def fingerprint(self) -> str:
        """What tells apart files that hold other tensors."""
        told = sorted(
            (n, e.file.name, e.key, e.shape, str(e.dtype)) for n, e in self.tensors.items()
        )
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def check(self, share: int, of: int) -> None:
        """Checks a share of what a checkpoint of merakc's has checksums of.

        Raises `CheckpointError`.
        """
        folder = self.files[0].parent
        if not self.place.is_dir() or not (folder / NAME).exists():
            return
        manifest = read_manifest(folder)
        tensors = {n: t for n, t in manifest.tensors.items() if n.startswith(WEIGHTS)}
        files = {n: f for n, f in manifest.files.items() if n in {t.file for t in tensors.values()}}
        check_files(
            folder, manifest.model_copy(update={"tensors": tensors, "files": files}), share, of
        )

    def read(self) -> Iterator[tuple[str, Callable[[Box], Iterator[torch.Tensor]]]]:
        """Every name, and what reads a box of that tensor as its next rows, file by file."""
        opened: dict[Path | Made, TensorFile] = {}
        for name, entry in sorted(self.tensors.items(), key=lambda item: item[1].order):
            if (entry.made or entry.file) not in opened:
                opened.clear()  # before what is made next takes memory
                opened[entry.made or entry.file] = _opened(entry)
            every = [(opened[entry.made or entry.file], entry)]
            every += [(_opened(e), e) for e in self.doubles.get(name, ())]
            yield name, lambda box, name=name, every=every: _rows(name, every, box)  # type: ignore[misc]


def _opened(entry: Entry) -> TensorFile:
    return MadeFile(entry.made) if entry.made else TensorFile(entry.file)


def _rows(name: str, every: list[tuple[TensorFile, Entry]], box: Box) -> Iterator[torch.Tensor]:
    """The rows of a box, which all entries must hold alike."""
    (file, entry), others = every[0], every[1:]
    read = [f.rows(e.key, box.starts, box.sizes, entry.dtype.itemsize) for f, e in others]
    rows = file.rows(entry.key, box.starts, box.sizes, entry.dtype.itemsize)
    for own, *same in zip(rows, *read, strict=True):
        for (_, other), more in zip(others, same, strict=True):
            if not torch.equal(own, more):
                raise CheckpointError(
                    f"{file.path}: '{entry.key}' and '{other.key}' are one tensor in the model "
                    f"('{name}') and differ in the files: untie them, or delete one"
                )
        yield own


def open_weights(given: str | Path, model: nn.Module) -> WeightFiles:
    """The files of a model's weights: a folder of transformers' form, a checkpoint, or one file.

    Raises `CheckpointError` for files that cannot be read, tensors that the model needs and they
    have not, or they have and the model has not, and for other shapes: each by its name.
    """
    place = Path(given).absolute()
    entries = [e for file, keys in _listed(place).items() for e in _entries(file, keys)]
    first = _first_names(model)
    named: dict[str, list[tuple[str, Entry]]] = {}
    unexpected = []
    own = (place if place.is_dir() else place.parent) / NAME  # written by merakc, by own names
    listed = [(e.key, e) for e in entries] if own.exists() else converted(entries, model)
    for key, entry in listed:
        name = _own_name(key, first, model)
        if name is None:
            unexpected.append(entry.key)
            continue
        named.setdefault(first[name], []).append((name, entry))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [k for k in unexpected if not any(re.search(p, k) for p in ignored)]
    missing = [n for n in dict.fromkeys(first.values()) if n not in named]
    if missing or unexpected:
        raise CheckpointError(_unlike(place, model, missing, unexpected))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found: dict[str, Entry] = {}
    doubles: dict[str, tuple[Entry, ...]] = {}
    for name, every in named.items():
        for _, entry in every:
            _check_fits(name, tensors[name], entry)
        names = [given_name for given_name, _ in every]
        if len(set(names)) < len(names):
            keys = " and ".join(f"'{e.key}'" for _, e in every)
            raise CheckpointError(f"{place} holds {keys}, which are both '{name}' in the model")
        every.sort(key=lambda pair: pair[0] != name)
        found[name], *rest = (entry for _, entry in every)
        if rest:
            doubles[name] = tuple(rest)
    return WeightFiles(place, found, doubles)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Of every name in the model's state dict, the first name of the same tensor."""
    first: dict[int, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first.setdefault(id(tensor), name)
    state = model.state_dict(keep_vars=True)
    return {n: first[id(t)] for n, t in state.items() if id(t) in first}


def _own_name(key: str, names: Mapping[str, str], model: nn.Module) -> str | None:
    """The model's name of what a file calls `key`: the same, or with the prefix of its base."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    among = (key, prefix + key, key.removeprefix(prefix))
    return next((name for name in among if name in names), None)


def _listed(place: Path) -> dict[Path, set[str] | None]:
    """The files, and of each the names that an index says it has."""
    if place.is_dir():
        place = next((p for n in (INDEX, SINGLE) if (p := place / n).exists()), place)
    if place.is_dir():
        own = sorted(p.name for p in place.glob("*.safetensors"))
        what = f"{len(own)} other safetensors files, of which one can be given" if own else "none"
        raise CheckpointError(
            f"weights: {place} holds neither {SINGLE} nor {INDEX} ({what}); `merakc checkpoint "
            "convert FILE FOLDER` makes such a folder of a file of torch's"
        )
    if place.suffix != ".json":
        return {place: None}
    try:
        names = parse_json(read_text(place))["weight_map"]
        found: dict[Path, set[str] | None] = {}
        for key, name in names.items():
            if name != Path(name).name:
                raise CheckpointError(f"{place} names a file outside of its folder: {name!r}")
            keys = found.setdefault(place.with_name(name), set())
            assert keys is not None
            keys.add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place} is damaged: {error!r}") from None
    if not found:
        raise CheckpointError(f"{place} names no tensors")
    return found


def _entries(file: Path, listed: set[str] | None) -> Iterator[Entry]:
    try:
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
            if listed is not None and (lost := sorted(listed - keys)):
                raise CheckpointError(f"{file} has no '{lost[0]}', which its index says it has")
            for key in sorted(keys if listed is None else listed):
                told = opened.get_slice(key)
                dtype = _DTYPE_OF.get(told.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{file}: '{key}' is {told.get_dtype()}, which torch cannot read"
                    )
                yield Entry(file, key, tuple(told.get_shape()), dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"weights: {file} cannot be read: {error}") from None


def _check_fits(name: str, own: torch.Tensor, entry: Entry) -> None:
    if tuple(own.shape) != entry.shape:
        raise CheckpointError(
            f"{entry.file}: '{entry.key}' is {list(entry.shape)}, and '{name}' of the model "
            f"{list(own.shape)}"
        )
    if own.is_floating_point() != entry.dtype.is_floating_point or (
        own.dtype != entry.dtype and not own.is_floating_point()
    ):
        raise CheckpointError(
            f"{entry.file}: '{entry.key}' is {entry.dtype}, and '{name}' of the model {own.dtype}; "
            "only between floating dtypes is it cast"
        )


def _unlike(place: Path, model: nn.Module, missing: list[str], unexpected: list[str]) -> str:
    """What the files and the model do not have in common."""
    said = [
        f"{what} {', '.join(map(repr, names[:3]))}{more}"
        for what, names in (
            (f"has no tensor for {type(model).__name__}'s", missing),
            ("has, and the model has not,", unexpected),
        )
        if names
        for more in [f" and {len(names) - 3} more" if len(names) > 3 else ""]
    ]
    return f"weights: {place} {'; it '.join(said)}"
