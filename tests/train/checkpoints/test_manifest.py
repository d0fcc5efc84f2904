"""No changed checkpoint is loaded, and what was changed is named."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError
from merakc.train.checkpoints.manifest import (
    NAME,
    Chunk,
    File,
    Manifest,
    Stored,
    check_files,
    read_manifest,
)
from tests.battery.small_models import warm_up
from tests.train.checkpoints.small_runs import saved, trained


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up()
    folder = tmp_path_factory.mktemp("run") / "step-2"
    run_ranks(2, partial(saved, folder, 2, {"seen": 17}, tp=2))
    return folder


def copied(whole: Path, to: Path) -> Path:
    return Path(shutil.copytree(whole, to / "copy"))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_files(folder, read_manifest(folder))
    return str(caught.value)


def test_an_unchanged_one_is_good(whole: Path) -> None:
    manifest = read_manifest(whole)
    check_files(whole, manifest)
    for share in range(3):
        check_files(whole, manifest, share, 3)
    assert {p.name for p in whole.iterdir()} == {NAME, *manifest.files}


def test_any_flipped_bit_is_seen(whole: Path, tmp_path: Path) -> None:
    folder, pick = copied(whole, tmp_path), random.Random(0)
    files = sorted(folder.iterdir())
    for _ in range(150):
        path = pick.choice(files)
        good = path.read_bytes()
        at = pick.randrange(len(good))
        bad = bytes([*good[:at], good[at] ^ 1 << pick.randrange(8), *good[at + 1 :]])
        if path.name == NAME and _same_json(good, bad):
            continue  # a space between two values
        path.write_bytes(bad)
        assert str(path) in refused(folder)
        path.write_bytes(good)
    check_files(folder, read_manifest(folder))


def _same_json(good: bytes, bad: bytes) -> bool:
    try:
        return bool(json.loads(good) == json.loads(bad))
    except ValueError:
        return False


def test_the_tensor_is_named(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    stored = read_manifest(folder).tensors["model/blocks.0.1.weight"]
    path = folder / stored.file
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + header["blocks.0.1.weight"]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    assert "tensor 'blocks.0.1.weight' is damaged" in refused(folder)


@pytest.mark.parametrize("how", ["cut", "longer", "missing", "swapped", "stale", "no manifest"])
def test_other_files_are_refused(how: str, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    path, other = folder / "model.safetensors", folder / "optimizer.safetensors"
    match how:
        case "cut":
            path.write_bytes(path.read_bytes()[:-8])
        case "longer":
            path.write_bytes(path.read_bytes() + bytes(8))
        case "missing":
            other.unlink()
        case "swapped":
            path.rename(folder / "x")
            other.rename(path)
            (folder / "x").rename(other)
        case "stale":
            saved(tmp_path / "later", 1, {"seen": 17}, micro_batches=1)
            shutil.copy(tmp_path / "later" / path.name, path)
        case "no manifest":
            (folder / NAME).unlink()
    assert str(folder) in refused(folder)


def test_a_plain_model_is_not_touched_by_a_bad_one(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    model, optimizer = trained(1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: tensor .* is damaged"):
        merakc.load(folder, model, optimizer)
    assert all(bool((p == before[n]).all()) for n, p in model.named_parameters())


# What every run tells.
LEAST: dict[str, Any] = {
    "parameters": [], "optimizers": [], "extras": [{"scheduler": [], "extra": None}],
}  # fmt: skip


@pytest.mark.parametrize("key", LEAST)
def test_a_run_tells_all_that_is_read(key: str, tmp_path: Path) -> None:
    run = {k: v for k, v in LEAST.items() if k != key}
    (tmp_path / NAME).write_text(Manifest(merakc="0", run=run).text())
    with pytest.raises(CheckpointError, match=f"is damaged: .*{key}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"plan": 7}, "plan"),
        ({"parallel": 1.5}, "parallel"),
        ({"extras": []}, "extras"),
        ({"extras": [{"scheduler": []}]}, "extras"),
        ({"optimizers": [{"kind": "x", "groups": [1]}]}, "optimizers"),
        ({"deep": [[[[1]]]] * 2}, ""),
    ],
)
def test_what_a_run_tells_is_of_the_form_that_is_read(
    run: dict[str, object], told: str, tmp_path: Path
) -> None:
    run = LEAST | run
    (tmp_path / NAME).write_text(Manifest(merakc="0", run=run).text())
    if not told:
        assert read_manifest(tmp_path).run == run
        return
    with pytest.raises(CheckpointError, match=f"is damaged: .*{told}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("boxes", "told"),
    [
        ([], "has 6 elements, and 0 were written"),
        ([([0, 0], [1, 3])], "has 6 elements, and 3 were written"),
        ([([0, 0], [2, 3]), ([0, 0], [1, 3])], "has 6 elements, and 9 were written"),
        ([([1, 0], [2, 3])], "has a box outside of"),
        ([([0], [6])], "has a box outside of"),
        ([([0, 0], [2])], "is damaged"),
    ],
)
def test_a_tensor_is_there_in_all_of_its_boxes(
    boxes: list[tuple[list[int], list[int]]], told: str, tmp_path: Path
) -> None:
    """What no box holds has no checksum."""
    chunks = [Chunk(starts=tuple(a), sizes=tuple(n), crc32=0) for a, n in boxes]
    tensors = {"model/w": Stored(file="f", dtype="float32", shape=(2, 3), chunks=chunks)}
    files = {"f": File(size_bytes=0, checked_bytes=0, crc32=0)}
    (tmp_path / NAME).write_text(
        Manifest(merakc="0", tensors=tensors, files=files, run=LEAST).text()
    )
    with pytest.raises(CheckpointError, match=told):
        read_manifest(tmp_path)


@pytest.mark.parametrize("body", ["7", '"\\ud800"', "[]"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_what_is_no_manifest_is_damaged(body: str, encoding: str, tmp_path: Path) -> None:
    crc = zlib.crc32(json.dumps(json.loads(body)).encode())
    text = f'{{"checkpoint": {body}, "crc32": {crc}}}'
    (tmp_path / NAME).write_bytes(text.encode(encoding))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        read_manifest(tmp_path)


def test_a_manifest_is_text_in_utf_8(tmp_path: Path) -> None:
    text = Manifest(merakc="0", run={"model": "a"}).text()
    (tmp_path / NAME).write_bytes(text.encode().replace(b'"a"', b'"\xed\xa0\x80"'))
    with pytest.raises(CheckpointError, match=r"damaged: .*utf-8"):
        read_manifest(tmp_path)
