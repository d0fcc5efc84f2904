"""Safetensors files as a storage of torch's distributed checkpoint.

The coordinator lays out the files, whose headers say where each whole tensor is to lie, and every
rank writes its boxes there: nothing is gathered, and what is written is what `from_pretrained`
reads. The folder is written under another name, and gets its own when all of it is on the disk.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from zlib_ng import zlib_ng

from merakc.errors import CheckpointError
from merakc.runtime.state import crc_of
from merakc.train.checkpoints.manifest import (
    EXTRA,
    MOST_BYTES,
    NAME,
    OPTIMIZER,
    WEIGHTS,
    Chunk,
    File,
    Manifest,
    Stored,
    TensorFile,
    stored_name,
)
from merakc.train.checkpoints.placing import check_replaceable, keep_others, put_in_place
from merakc.version import __version__

STEMS = {WEIGHTS: "model", OPTIMIZER: "optimizer", EXTRA: "extra"}
FILE_BYTES = 5 << 30  # of weights in one file, as transformers has them
MOST_HEADER_BYTES = 100_000_000  # that safetensors reads
LEAST_RUN_BYTES = 1 << 20  # of one host, shorter runs are written through mapped memory
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64",
}  # fmt: skip


@dataclass
class Writer(StorageWriter):
    """Writes to `folder`. On the coordinator `run` is what the manifest says beside tensors, and
    `others` the texts of other files, by name. With `dtype`, floating tensors are cast to it.
    """

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int = FILE_BYTES
    dtype: torch.dtype | None = None
    made: dict[str, Stored] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from a save before."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is."""
        return True

    @property
    def aside(self) -> Path:
        """Where the folder is written."""
        return self.folder.with_name(f".{self.folder.name}.writing")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Makes the folder. Raises `CheckpointError` where what lies there is no checkpoint."""
        if is_coordinator:
            check_replaceable(self.folder)
            shutil.rmtree(self.aside, ignore_errors=True)  # of a save that was killed
            self.aside.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Says the host."""
        return replace(plan, storage_data=os.uname().nodename)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lays out the files, and tells the ranks where tensors begin, and whether all are on one
        host: on several, one that writes a mapped page may lose what another wrote into it.
        """
        tensors: dict[str, TensorWriteData] = {}
        for plan in plans:
            for item in plan.items:
                assert item.tensor_data is not None, item
                properties = TensorProperties(dtype=self._cast(item.tensor_data.properties.dtype))
                data = replace(item.tensor_data, properties=properties)
                tensors.setdefault(item.index.fqn, data)
        where: dict[str, tuple[str, int]] = {}
        for kind, stem in STEMS.items():
            own = {n: t for n, t in tensors.items() if n.startswith(kind)}
            for name, members in _file_names(stem, own, self.file_bytes).items():
                where |= self._lay_out(name, members)
        is_one_host = len({plan.storage_data for plan in plans}) == 1
        return [replace(plan, storage_data=(where, is_one_host)) for plan in plans]

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def _lay_out(
        self, file: str, members: Mapping[str, TensorWriteData]
    ) -> dict[str, tuple[str, int]]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, starts = 0, {}
        for name, data in members.items():
            size = data.size.numel() * data.properties.dtype.itemsize
            dtype, starts[name] = DTYPES.get(data.properties.dtype), at
            if dtype is None or stored_name(name) == "__metadata__":
                what = f"{data.properties.dtype} and named {stored_name(name)!r}"
                raise CheckpointError(f"'{name}' is {what}, which no safetensors file holds")
            header[stored_name(name)] = {
                "dtype": dtype, "shape": list(data.size), "data_offsets": [at, at + size],
            }  # fmt: skip
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        check_readable(f"the header of {file}", len(text), MOST_HEADER_BYTES)
        head = len(text).to_bytes(8, "little") + text
        size_bytes = len(head) + at
        with (self.aside / file).open("wb") as opened:
            opened.write(head)
            opened.flush()
            os.posix_fallocate(opened.fileno(), 0, size_bytes)  # a full disk says so here
        self.files[file] = File(
            size_bytes=size_bytes, checked_bytes=len(head), crc32=zlib_ng.crc32(head)
        )
        for name, data in members.items():
            dtype = str(data.properties.dtype).removeprefix("torch.")
            self.made[name] = Stored(file=file, dtype=dtype, shape=tuple(data.size))
        return {name: (file, len(head) + start) for name, start in starts.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's boxes."""
        results = []
        by_file: dict[str, list[Any]] = {}
        where, is_one_host = plan.storage_data
        for item in plan.items:
            by_file.setdefault(where[item.index.fqn][0], []).append(item)
        for file, items in by_file.items():
            if not os.path.isfile(self.aside / file):
                raise CheckpointError(
                    f"{self.aside / file} is not seen on host {os.uname().nodename}: all ranks "
                    "write one folder, so it has to lie on storage that all hosts share"
                )
            with (self.aside / file).open("r+b") as opened:
                for item in items:
                    box = planner.resolve_data(item)
                    assert isinstance(box, torch.Tensor)
                    box, data = box.detach().to("cpu", self._cast(box.dtype)), item.tensor_data
                    box = box.contiguous()
                    start = where[item.index.fqn][1]
                    place = start, data.chunk.offsets, data.size
                    _write_box(opened.fileno(), box, *place, is_mapped=is_one_host)
                    chunk = Chunk(
                        starts=tuple(data.chunk.offsets),
                        sizes=tuple(data.chunk.sizes),
                        crc32=crc_of(box),
                    )
                    results.append(WriteResult(item.index, box.nbytes, chunk))
                _to_disk(opened.fileno())
        for file in by_file:
            with (self.aside / file).open("r+b") as opened:
                os.fsync(opened.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the other files and the manifest, and gives the folder its name."""
        for result in (r for one in results for r in one):
            self.made[result.index.fqn].chunks.append(result.storage_data)
        others = dict(self.others)
        weights = {stored_name(n): t.file for n, t in self.made.items() if n.startswith(WEIGHTS)}
        if len(set(weights.values())) > 1:
            sizes = (self.files[f].size_bytes for f in set(weights.values()))
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weights}
            others["model.safetensors.index.json"] = json.dumps(index, indent=1) + "\n"
        for name, text in others.items():
            _write_text(self.aside / name, text)
            data = text.encode()
            self.files[name] = File(
                size_bytes=len(data), checked_bytes=len(data), crc32=zlib_ng.crc32(data)
            )
        manifest = Manifest(merakc=__version__, files=self.files, tensors=self.made, run=self.run)
        text = manifest.text()
        check_readable(NAME, len(text), MOST_BYTES)
        _write_text(self.aside / NAME, text)
        keep_others(self.folder, self.aside)
        put_in_place(self.aside, self.folder)


def check_readable(name: str, size_bytes: int, most_bytes: int) -> None:
    """Raises `CheckpointError` for a file that would be too large to be read back."""
    if size_bytes > most_bytes:
        raise CheckpointError(
            f"{name} would have {size_bytes:,} bytes, and more than {most_bytes:,} are not read: "
            "give long lists of extra= as tensors, and many small tensors as one"
        )


def _file_names(
    stem: str, tensors: Mapping[str, TensorWriteData], most_bytes: int
) -> dict[str, dict[str, TensorWriteData]]:
    """The tensors of each file, as transformers would name them."""
    groups: list[dict[str, TensorWriteData]] = [{}]
    held = 0
    for name, data in tensors.items():
        size = data.size.numel() * data.properties.dtype.itemsize
        if groups[-1] and held + size > most_bytes:
            groups.append({})
            held = 0
        groups[-1][name] = data
        held += size
    if not tensors:
        return {}
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    count = len(groups)
    return {f"{stem}-{k + 1:05}-of-{count:05}.safetensors": g for k, g in enumerate(groups)}


def _write_box(
    file: int, box: torch.Tensor, start: int, offsets: Sequence[int], shape: Sequence[int],
    *, is_mapped: bool,
) -> None:  # fmt: skip
    """Writes a box of a tensor that begins at byte `start` of an open file; what lies apart in it
    through mapped memory, if that may be.
    """
    if not box.numel():
        return
    size = box.element_size()
    strides = [s * size for s in torch.empty(tuple(shape), device="meta").stride()]
    first = start + sum(a * s for a, s in zip(offsets, strides, strict=True))
    inner = max(0, box.dim() - 1)  # from this dim on all lies behind each other in the file
    while inner > 0 and box.shape[inner] == shape[inner]:
        inner -= 1
    data = box.reshape(-1).view(torch.uint8).numpy()
    runs = box.shape[:inner]
    length = data.nbytes // max(1, runs.numel())
    if runs.numel() == 1 or length >= LEAST_RUN_BYTES or not is_mapped:
        for k, at in enumerate(np.ndindex(*runs)):
            there = first + sum(i * s for i, s in zip(at, strides, strict=False))
            _pwrite(file, data[k * length : (k + 1) * length], there)
        return
    page = first - first % mmap.ALLOCATIONGRANULARITY
    last = first + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + size
    with mmap.mmap(file, last - page, offset=page) as mapped:
        raw = np.frombuffer(mapped, np.uint8, offset=first - page)
        there = np.lib.stride_tricks.as_strided(raw, (*box.shape, size), (*strides, 1))
        there[...] = data.reshape(*box.shape, size)
        del raw, there


def _pwrite(file: int, data: np.ndarray[Any, Any], at: int) -> None:
    view = memoryview(data)  # type: ignore[arg-type]
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def _to_disk(file: int) -> None:
    """Lets what was written begin to go to the disk, and does not wait for it."""
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:  # Linux's; elsewhere all goes when it is waited for
        begin(file, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # SYNC_FILE_RANGE_WRITE, to the end


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


@dataclass
class Reader(StorageReader):
    """Reads a checkpoint, whose files were checked, into the tensors of any plan."""

    folder: Path
    manifest: Manifest
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors that lie there as others

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from a load before."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """All tensors, each as one piece: its file has it whole."""
        found = {}
        for name, stored in self.manifest.tensors.items():
            shape = torch.Size(stored.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            properties = TensorProperties(dtype=stored.torch_dtype)
            found[name] = TensorStorageMetadata(properties, shape, [chunk])
        return Metadata(found)  # type: ignore[arg-type]

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies this rank's boxes out of mapped files."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            stored = self.manifest.tensors[item.storage_index.fqn]
            by_file.setdefault(stored.file, []).append(item)
        for file, items in by_file.items():
            opened = TensorFile(self.folder / file)
            for item in items:
                full = item.storage_index.fqn
                name, at = stored_name(self.copies.get(full, full)), 0
                target = planner.resolve_tensor(item).detach()
                itemsize = self.manifest.tensors[full].torch_dtype.itemsize
                for rows in opened.rows(name, item.storage_offsets, item.lengths, itemsize):
                    own = target[at : at + len(rows)] if rows.dim() else target
                    own.copy_(rows)
                    at += len(rows) if rows.dim() else 1
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
