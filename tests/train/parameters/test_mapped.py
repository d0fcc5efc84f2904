"""Pages of mapped files are given back, and what was written to them is not lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from merakc.train.parameters.mapped import let_go

NUMEL = 1 << 21


def file_bytes() -> int:
    """What this process holds of files."""
    told = Path("/proc/self/status").read_text().split("RssFile:")[1]
    return int(told.split()[0]) << 10


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_was_read_is_given_back(tmp_path: Path, is_shared: bool) -> None:
    wanted = torch.arange(NUMEL, dtype=torch.float32)
    path = tmp_path / "weights"
    wanted.numpy().tofile(path)
    given = torch.from_file(str(path), shared=is_shared, size=NUMEL)
    given[NUMEL // 2] = wanted[NUMEL // 2] = -1  # in the file, too, if shared
    assert given.equal(wanted)
    before = file_bytes()
    let_go(given.view(2, -1)[:, 8:])  # and the pages between its rows
    assert before - file_bytes() > 0.99 * given.nbytes
    assert given.equal(wanted)


def test_other_memory_stays() -> None:
    for given in (torch.arange(NUMEL), torch.ones(()), torch.ones(0), torch.ones(2, device="meta")):
        kept = given.clone()
        let_go(given)
        assert given.is_meta or given.equal(kept)
