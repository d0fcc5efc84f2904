"""What a checkpoint's folder holds, with a checksum of every byte: `checkpoint.json`.

Tensors lie whole in safetensors files, which other programs read, in boxes as the ranks wrote them.
A file is its header and its boxes, each with a CRC-32; other files have one of all they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from operator import gt
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from zlib_ng import zlib_ng

from merakc.errors import CheckpointError
from merakc.files.reading import MOST_NUMBER, check_depth, misread, read_text
from merakc.runtime.state import crc_of

NAME = "checkpoint.json"
VERSION = 1
MOST_BYTES = 1 << 28  # of a text: boxes of a million tensors
READ_BYTES = 1 << 24
MAPPED_BYTES = 1 << 24  # of a file, before it is opened anew


Count = Annotated[int, Field(ge=0, le=MOST_NUMBER)]


class Chunk(BaseModel):
    """A box of a tensor, and the CRC-32 of its elements in row-major order."""

    model_config = ConfigDict(extra="forbid")
    starts: tuple[Count, ...]
    sizes: tuple[Count, ...]
    crc32: int


class Stored(BaseModel):
    """A tensor: its file, the dtype and shape of the whole, and the boxes that were written."""

    model_config = ConfigDict(extra="forbid")
    file: str
    dtype: str
    shape: tuple[Count, ...]
    chunks: list[Chunk] = []

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"a tensor has the unknown dtype {self.dtype!r}")
        return found


class File(BaseModel):
    """A file: its bytes, and the CRC-32 of the first `checked` of them."""

    model_config = ConfigDict(extra="forbid")
    size_bytes: Count
    checked_bytes: Count
    crc32: int


class Manifest(BaseModel):
    """Everything in the folder. `run` is what is neither a tensor nor a file, as JSON."""

    model_config = ConfigDict(extra="forbid")
    version: int = VERSION
    merakc: str
    files: dict[str, File] = {}
    tensors: dict[str, Stored] = {}
    run: dict[str, Any] = {}

    def text(self) -> str:
        """What `checkpoint.json` says: all of this, and its CRC-32."""
        body = self.model_dump(mode="json")
        return json.dumps({"crc32": _body_crc(body), "checkpoint": body}) + "\n"


class _Group(BaseModel):
    options: dict[str, Any]


class _Optimizer(BaseModel):
    kind: str
    groups: list[_Group]


class _PlanOf(BaseModel):
    hash: str
    precision: str


class _Scale(BaseModel):
    scale: float
    good_steps: Count
    skipped: Count


class _Parallel(BaseModel):
    step: Count = 0
    seed: int = 0
    loss_scale: _Scale | None = None


class _Extras(BaseModel):
    scheduler: list[Any]
    extra: Any


class _Run(BaseModel):
    """What `run` has, of that form where it is there."""

    parameters: list[str]
    optimizers: list[_Optimizer]
    extras: list[_Extras] = Field(min_length=1)
    model: str = ""
    world_size: int = 1
    saved_at: str = ""  # UTC, in ISO 8601: texts that are in order as their times are
    parallel: _Parallel = _Parallel()
    tied: dict[str, str] = {}  # names of parameters and buffers, and the first names of the same
    plan: _PlanOf | None = None


def _body_crc(body: Any) -> int:
    return zlib_ng.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises `CheckpointError` where the folder is none, or it was
    changed.
    """
    path = folder / NAME
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        if not folder.exists():
            meant = _beside(folder) or "; give one that merakc.save wrote"
            raise CheckpointError(f"{folder}: there is no such folder{meant}") from None
        raise CheckpointError(
            f"{folder} is no checkpoint: {path.name} cannot be read ({error.strerror}); a folder "
            f"that was being written when a run ended has none{_beside(folder)}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    try:
        outer = json.loads(text, object_pairs_hook=_once)
        body = outer["checkpoint"]
        if not isinstance(body, dict):
            raise ValueError(f"its checkpoint is {str(body)[:40]}")
        if set(outer) != {"crc32", "checkpoint"} or _body_crc(body) != outer["crc32"]:
            raise ValueError("its checksum does not fit what it says")
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"{path} is of version {body.get('version')}, and this merakc reads {VERSION}"
            )
        check_depth(body)
        found = Manifest.model_validate(body)
        _Run.model_validate(found.run)
        for wrong in misread(body, found.model_dump(mode="json"), NAME):
            raise ValueError(wrong)
        for tensor, stored in found.tensors.items():
            _check_boxes(tensor, stored)
    except (ValueError, TypeError, KeyError, ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None
    for name in {*found.files, *(t.file for t in found.tensors.values())}:
        if name != Path(name).name or name not in found.files:
            raise CheckpointError(f"{path} names a file outside of its folder: {name!r}")
    return found


def _check_boxes(name: str, stored: Stored) -> None:
    """Raises `ValueError` where the boxes that were written, of which each has a checksum, are not
    all of the tensor.
    """
    for box in stored.chunks:
        ends = [a + n for a, n in zip(box.starts, box.sizes, strict=True)]
        if len(ends) != len(stored.shape) or any(map(gt, ends, stored.shape)):
            raise ValueError(f"'{name}' has a box outside of {list(stored.shape)}")
    written, numel = sum(prod(box.sizes) for box in stored.chunks), prod(stored.shape)
    if written != numel:
        raise ValueError(f"'{name}' has {numel} elements, and {written} were written")


def _beside(folder: Path) -> str:
    """What may have been meant: where a save was killed between two renames, the checkpoint that
    was to be replaced; where the folder holds checkpoints, these.
    """
    old = folder.with_name(f".{folder.name}.old") if folder.name else folder
    if (old / NAME).exists():
        return f"; rename {old}, which was there before"
    inside = sorted(p.parent.name for p in folder.glob(f"[!.]*/{NAME}"))
    return f"; it holds the checkpoints {', '.join(inside[-4:])}" if inside else ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def check_files(folder: Path, manifest: Manifest, share: int = 0, of: int = 1) -> None:
    """Checks every `of`-th file and box, beginning with number `share`, against its checksum.

    Raises `CheckpointError` that names the file, and the tensor.
    """
    for k, (name, file) in enumerate(sorted(manifest.files.items())):
        if (k % of) == share:
            _check_file(folder / name, file)
    jobs = list(_jobs(manifest))
    opened = TensorFile(folder)
    for name, stored, chunk in jobs[share::of]:
        if opened.path != folder / stored.file:
            opened = TensorFile(folder / stored.file)
        _check_chunk(opened, name, stored, chunk)


def _jobs(manifest: Manifest) -> Iterator[tuple[str, Stored, Chunk]]:
    for name, stored in sorted(manifest.tensors.items(), key=lambda t: (t[1].file, t[0])):
        for chunk in stored.chunks:
            yield name, stored, chunk


def _check_file(path: Path, file: File) -> None:
    try:
        size_bytes, crc, left = path.stat().st_size, 0, file.checked_bytes
        with path.open("rb") as opened:
            while left > 0 and (read := opened.read(min(left, READ_BYTES))):
                crc, left = zlib_ng.crc32(read, crc), left - len(read)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if size_bytes != file.size_bytes:
        raise CheckpointError(f"{path} has {size_bytes} bytes, and {file.size_bytes} were written")
    if crc != file.crc32:
        what = "" if file.checked_bytes == file.size_bytes else "the header of "
        raise CheckpointError(f"{what}{path} is damaged: its checksum is another")


class TensorFile:
    """A safetensors file that is read in boxes.

    What is read of a mapped file counts as memory of the process until the file is closed, so it
    is opened anew from time to time, and large boxes are read in rows.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._read_bytes = path, 0
        self._file: Any = None

    def rows(
        self, name: str, starts: Sequence[int], sizes: Sequence[int], itemsize: int
    ) -> Iterator[torch.Tensor]:
        """A box of a tensor as its next rows, each to be let go of before the next is asked for.

        Raises `CheckpointError`.
        """
        row_bytes = torch.Size(sizes[1:]).numel() * itemsize
        many, done = max(1, MAPPED_BYTES // max(1, row_bytes)), 0
        while done < (sizes[0] if sizes else 1):
            count = min(many, sizes[0] - done) if sizes else 1
            first = (starts[0] + done, *starts[1:]) if starts else ()
            yield self._box(name, first, (count, *sizes[1:]) if sizes else ())
            done += count

    def _box(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        try:
            if self._file is None or self._read_bytes >= MAPPED_BYTES:
                self._file, self._read_bytes = safe_open(self.path, framework="pt"), 0
            where = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            opened = self._file
            found: torch.Tensor = (
                opened.get_slice(name)[where] if where else opened.get_tensor(name)
            )
        except (OSError, SafetensorError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.path}: '{name}' cannot be read: {error}") from None
        self._read_bytes += found.nbytes
        return found


def _check_chunk(file: TensorFile, name: str, stored: Stored, chunk: Chunk) -> None:
    key, crc, numel = stored_name(name), 0, 0
    for rows in file.rows(key, chunk.starts, chunk.sizes, stored.torch_dtype.itemsize):
        crc, numel = crc_of(rows, crc), numel + rows.numel()
    if numel != torch.Size(chunk.sizes).numel() or crc != chunk.crc32:
        where = "" if chunk.sizes == stored.shape else f" at {list(chunk.starts)}"
        raise CheckpointError(
            f"{file.path}: tensor '{key}' is damaged{where}: its checksum is "
            "another than when it was written"
        )


# Which files a tensor goes to is the first part of its name in the manifest.
WEIGHTS, OPTIMIZER, EXTRA = "model/", "optimizer/", "extra/"


def stored_name(name: str) -> str:
    """The name of a tensor inside of its file."""
    return name.partition("/")[2]
