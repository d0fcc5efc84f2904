"""The files are those of transformers, however many ranks write them."""

from __future__ import annotations

import json
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.train.checkpoints import storage
from tests.battery.small_models import warm_up
from tests.train.checkpoints.small_runs import trained


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def exported(folder: Path, name: str, layout: dict[str, Any]) -> dict[str, Any]:
    case = MODELS[name]
    batch = {k: v.chunk(layout.get("dp", 1))[0] for k, v in case.batch(8).items()}
    model = merakc.auto_parallel(case.model(), batch, cluster=NOMINAL_CPU, **layout)
    merakc.save(folder, model)
    return model.full_state_dict()


@pytest.mark.parametrize(
    ("name", "kind", "layout"),
    [
        ("gpt2", transformers.GPT2LMHeadModel, {"tp": 2}),
        ("t5", transformers.T5ForConditionalGeneration, {"dp": 2, "state_shards": "zero-3"}),
    ],
)
def test_from_pretrained_reads_the_folder(
    name: str, kind: Any, layout: dict[str, Any], tmp_path: Path
) -> None:
    wanted = run_ranks(2, partial(exported, tmp_path / "c", name, layout))[0]
    model, told = kind.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not any(told[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key


def test_many_files_have_an_index(tmp_path: Path) -> None:
    model, _ = trained(0)
    writer = partial(storage.Writer, file_bytes=1000)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("merakc.train.checkpoints.saving.Writer", writer)
        merakc.save(tmp_path / "c", model)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found = {k: v for f in files for k, v in load_file(tmp_path / "c" / f).items()}
    assert found.keys() == index["weight_map"].keys() == dict(model.named_parameters()).keys()
    assert merakc.load(tmp_path / "c", model).step == 0


def full_disk(folder: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model, optimizer = trained(1, tp=2)
    merakc.save(folder / "good", model, optimizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        merakc.save(folder / "good", model, optimizer)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.distributed.barrier()
    assert merakc.load(folder, model, optimizer).folder == folder / "good"
    return str(caught.value)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    for text in run_ranks(2, partial(full_disk, tmp_path)):
        assert "good was not written: rank 0: [Errno 27] File too large" in text
    assert [p.name for p in tmp_path.iterdir()] == ["good"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, _ = trained(0)
    with pytest.raises(CheckpointError, match=r"was not written: rank 0: \[Errno 20\]"):
        merakc.save(tmp_path / "file" / "c", model)


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    model, _ = trained(0)
    merakc.save(tmp_path / "runs" / "c", model)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "c")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    for name in ("runs", "file", "link", "mine"):
        for write in (merakc.save, merakc.export):
            with pytest.raises(CheckpointError, match=rf"{name} is there and is no checkpoint"):
                write(tmp_path / name, model)  # type: ignore[operator]
    merakc.save(tmp_path / "runs" / "c", model)
    kept = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")}
    files = {"checkpoint.json", "model.safetensors"}
    there = {"runs", "runs/c", "file", "link", "mine", "mine/notes"}
    assert kept == there | {f"runs/c/{name}" for name in files}


def test_what_would_be_too_large_to_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(storage, "MOST_BYTES", 5_000)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json would have .* lists of extra="):
        merakc.save(tmp_path / "c", model, extra=[*range(2_000)])
    monkeypatch.setattr(storage, "MOST_HEADER_BYTES", 1_000)
    with pytest.raises(CheckpointError, match=r"header of extra\.safetensors would have"):
        merakc.save(tmp_path / "c", model, extra=[torch.ones(1)] * 20)
    assert not any(tmp_path.iterdir())


def test_numbers_that_no_file_holds_have_a_remedy(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    merakc.save(tmp_path / "c", model)
    assert merakc.load(tmp_path / "c", model).step == 0
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"'model/wide' is torch.complex128.*view_as_real"):
        merakc.save(tmp_path / "d", model)
