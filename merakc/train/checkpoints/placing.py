"""How a finished checkpoint comes to its name, and what lies there already."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from pathlib import Path

from merakc.errors import CheckpointError
from merakc.train.checkpoints.manifest import NAME, read_manifest

_WRITTEN = re.compile(
    r"(model|optimizer|extra)(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(config|plan)\.json"
)


def check_replaceable(folder: Path) -> None:
    """Raises `CheckpointError` for a file, a link, and a folder of anything but a checkpoint."""
    is_empty = folder.is_dir() and not any(folder.iterdir())
    is_other = folder.exists() and not is_empty and not (folder / NAME).is_file()
    if folder.is_symlink() or is_other or any(p.is_dir() for p in _in(folder)):
        raise CheckpointError(
            f"{folder} is there and is no checkpoint, or holds other folders: it would be deleted; "
            "give a new folder in it, or remove it"
        )


def _in(folder: Path) -> list[Path]:
    return [*folder.iterdir()] if folder.is_dir() else []


def keep_others(folder: Path, aside: Path) -> None:
    """Takes along what others put beside the checkpoint that is to be replaced, as a tokenizer.

    Where its manifest is damaged, what is named as a checkpoint's files is taken for its own.
    """
    try:
        own = {NAME, *read_manifest(folder).files}
    except CheckpointError:
        own = {NAME, *(path.name for path in _in(folder) if _WRITTEN.fullmatch(path.name))}
    for path in _in(folder):
        if path.name not in own and not (aside / path.name).exists():
            try:
                os.link(path, aside / path.name, follow_symlinks=False)
            except OSError:  # of file systems without links
                shutil.copy2(path, aside / path.name, follow_symlinks=False)


def put_in_place(aside: Path, folder: Path) -> None:
    """Renames a finished folder, in the place of one that is there: at once where the file system
    can exchange names, so that no moment is without either.
    """
    sync_folder(aside)
    if _exchanged(aside, folder):
        old = aside
    else:
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether two folders have got each other's names (renameat2, Linux 3.15)."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    at, names = ctypes.c_int(-100), [os.fsencode(path) for path in (one, other)]  # AT_FDCWD
    done: int = rename(at, names[0], at, names[1], ctypes.c_uint(2))  # RENAME_EXCHANGE
    return done == 0


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
