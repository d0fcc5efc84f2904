"""Safetensors files as a storage of torch's distributed checkpoint.

The coordinator lays out the files, whose headers say where each whole tensor is to lie, and every
rank writes its boxes there: nothing is gathered, and what is written is what `from_pretrained`
reads. The folder is written under another name, and gets its own when all of it is on the disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    WriteItem,
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
from merakc.train.checkpoints.strips import (
    Box,
    Held,
    Strip,
    bring_together,
    runs_of,
    strips_of,
)
from merakc.version import __version__

STEMS = {WEIGHTS: "model", OPTIMIZER: "optimizer", EXTRA: "extra"}
FILE_BYTES = 5 << 30  # of weights in one file, as transformers has them
MOST_HEADER_BYTES = 100_000_000  # that safetensors reads
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.complex64: "C64",
}  # fmt: skip

_WIDE = (
    ": keep it in another dtype; complex numbers as complex64, or as two (torch.view_as_real, and "
    "torch.view_as_complex in the forward)"
)


class _Plain:
    """What torch asks of storage, and ours has no need of."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one before."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path is."""
        return True

    def prepare_local_plan(self, plan: Any) -> Any:
        """As it is."""
        return plan


@dataclass
class Writer(_Plain, StorageWriter):
    """Writes to `folder`. On the coordinator `run` is what the manifest says beside tensors, and
    `others` the texts of other files, by name. With `dtype`, floating tensors are cast to it.
    `group` is that of the ranks that write, for tensors in host memory; without, one does alone.
    """

    folder: Path
    run: dict[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int = FILE_BYTES
    dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    made: dict[str, Stored] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)

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

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lays out the files, and tells the ranks where tensors begin, and which strips of them
        they bring together.
        """
        tensors: dict[str, TensorWriteData] = {}
        held: dict[str, Held] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                dtype = self._cast(_data_of(item).properties.dtype)
                data = replace(_data_of(item), properties=TensorProperties(dtype=dtype))
                tensors.setdefault(item.index.fqn, data)
                of_all = Held(tuple(data.size), dtype.itemsize, [])
                boxes = held.setdefault(item.index.fqn, of_all).boxes
                boxes.append((rank, _box_of(item)))
        where: dict[str, tuple[str, int]] = {}
        for kind, stem in STEMS.items():
            own = {n: t for n, t in tensors.items() if n.startswith(kind)}
            for name, members in _file_names(stem, own, self.file_bytes).items():
                where |= self._lay_out(name, members)
        apart = sorted((name for name in held if held[name].is_apart()), key=where.__getitem__)
        strips = strips_of({name: held[name] for name in apart})
        return [
            replace(plan, storage_data=(where, [s for s in strips if rank in s.ranks()]))
            for rank, plan in enumerate(plans)
        ]

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
                raise CheckpointError(
                    f"'{name}' is {what}, which no safetensors file holds{_WIDE * (dtype is None)}"
                )
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
        """Writes this rank's boxes, or strips of the tensors whose boxes lie apart."""
        results = []
        where, strips = plan.storage_data
        items = {(item.index.fqn, _box_of(item)): item for item in plan.items}

        def box_of(name: str, box: Box) -> torch.Tensor:
            item = items.pop((name, box))
            found = planner.resolve_data(item)
            assert isinstance(found, torch.Tensor)
            found = found.detach().to("cpu", self._cast(found.dtype)).contiguous()
            chunk = Chunk(starts=box[0], sizes=box[1], crc32=crc_of(found))
            results.append(WriteResult(item.index, found.nbytes, chunk))
            return found

        with _Files(self.aside) as files:

            def write(strip: Strip, data: torch.Tensor) -> None:
                name, start = where[strip.name]
                files.write(name, data, start + strip.at_byte)

            if strips:  # in a thread, where Ctrl-C does not come: other ranks wait for all of it
                with ThreadPoolExecutor(1, "merakc-strips") as pool:
                    pool.submit(bring_together, strips, box_of, self.group, write).result()
            for full, box in sorted(items, key=lambda key: where[key[0]]):
                (name, start), shape = where[full], _data_of(items[full, box]).size
                for at, run in runs_of(box_of(full, box), box, shape):
                    files.write(name, run, start + at)
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


def _data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, item
    return item.tensor_data


def _box_of(item: WriteItem) -> Box:
    chunk = _data_of(item).chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


class _Files:
    """Files of one folder, written one after the other; as a context, on the disk at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[str] = set()
        self.name, self.file = "", -1

    def write(self, name: str, data: torch.Tensor, at: int) -> None:
        """Writes bytes to a file that is there, from byte `at` on."""
        if name != self.name:
            self._close()
            self.file, self.name = self._opened(name), name
            self.written.add(name)
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        while view:
            count = os.pwrite(self.file, view, at)
            view, at = view[count:], at + count

    def _opened(self, name: str) -> int:
        try:
            return os.open(self.folder / name, os.O_RDWR)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder / name} is not seen on host {os.uname().nodename}: all ranks "
                "write one folder, so it has to lie on storage that all hosts share"
            ) from None

    def _close(self) -> None:
        """Lets what was written begin to go to the disk, and does not wait for it."""
        if self.file < 0:
            return
        begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if begin is not None:  # Linux's; elsewhere all goes when it is waited for
            begin(self.file, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # its SYNC_FILE_RANGE_WRITE
        os.close(self.file)
        self.name, self.file = "", -1

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close()
        for name in self.written if kind is None else ():
            file = self._opened(name)
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


@dataclass
class Reader(_Plain, StorageReader):
    """Reads a checkpoint, whose files were checked, into the tensors of any plan."""

    folder: Path
    manifest: Manifest
    copies: Mapping[str, str] = field(default_factory=dict)  # tensors that lie there as others

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
