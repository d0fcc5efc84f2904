"""Writes files whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Writes a file that others see as it was or as it is to be, never in between.

    A temporary file beside it is written, synchronised with the disk and renamed: neither a full
    disk nor a kill costs what was there. Text is written in UTF-8. What is no regular file, such as
    `/dev/stdout`, is written to. Raises `OSError`.
    """
    place = Path(path).resolve()
    body = data.encode() if isinstance(data, str) else data
    if place.exists() and not place.is_file():
        place.write_bytes(body)
        return
    aside = place.with_name(f".merakc-{secrets.token_hex(8)}.tmp")
    try:
        # A new file with the rights that any has; what is replaced keeps its own.
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(file, "wb") as opened:
            if place.exists():
                os.fchmod(file, place.stat().st_mode & 0o777)
            opened.write(body)
            opened.flush()
            os.fsync(file)
        os.replace(aside, place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY)  # the new name is to last, too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
