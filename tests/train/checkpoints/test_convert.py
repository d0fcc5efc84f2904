"""Checkpoints go to other programs' files and come back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError
from merakc.train.checkpoints.convert import (
    read_contents,
    weights_only,
    with_dtype,
    with_experts,
    write_folder,
    write_torch,
)
from tests.battery.small_models import warm_up, words
from tests.train.checkpoints.small_runs import saved, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up()
    folder = tmp_path_factory.mktemp("runs") / "step-2"
    run_ranks(4, partial(saved, folder, 2, {"seen": 17}, tp=2, pp=2))
    return folder


def same(first: Any, second: Any) -> None:
    assert first.tensors.keys() == second.tensors.keys()
    for name, value in first.tensors.items():
        assert torch.equal(value, second.tensors[name]), name


def test_one_file_is_what_torch_loads(folder: Path, tmp_path: Path) -> None:
    write_torch(read_contents(folder), tmp_path / "run.pt")
    found = torch.load(tmp_path / "run.pt")
    model, optimizer = trained(0)
    model.load_state_dict(found["model"], strict=False)
    optimizer.load_state_dict(found["optimizer"][0])
    assert (found["step"], found["extra"]) == (2, {"seen": 17})
    wanted, other = trained(2)
    for one, steps in ((model, optimizer), (wanted, other)):
        one(**words(5))["loss"].backward()
        steps.step()
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
    write_folder(read_contents(tmp_path / "run.pt"), tmp_path / "back")
    same(read_contents(folder), read_contents(tmp_path / "back"))
    again, optimizer = trained(0)
    assert merakc.load(tmp_path / "back", again, optimizer).step == 2


def test_hugging_face_folders_come_and_go(tmp_path: Path) -> None:
    model = MODELS["mixtral"].model()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    contents = read_contents(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    write_folder(with_dtype(contents, torch.bfloat16), tmp_path / "c")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert found.dtype == torch.bfloat16
    for name, value in found.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16()), name
    split = with_experts(contents, packed=False) if "packed" in _experts(contents) else contents
    packed = with_experts(split, packed=True)
    again = with_experts(packed, packed=False)
    same(split, again)
    assert len(packed.tensors) < len(split.tensors)
    with pytest.raises(CheckpointError, match="there are no experts in tensors of their own"):
        with_experts(packed, packed=True)


def _experts(contents: Any) -> str:
    return "split" if any(".experts.0." in n for n in contents.tensors) else "packed"


def test_weights_alone(folder: Path, tmp_path: Path) -> None:
    write_folder(weights_only(read_contents(folder)), tmp_path / "c")
    assert {p.name for p in tmp_path.joinpath("c").iterdir()} == {
        "checkpoint.json", "model.safetensors",
    }  # fmt: skip
    assert len(load_file(tmp_path / "c" / "model.safetensors")) == len(
        list(trained(0)[0].parameters())
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "holds no checkpoint and no safetensors files"),
        ("text.pt", "cannot be read"),
        ("list.pt", "holds a list, not a state dict"),
        ("code.pt", "holds objects that are more than data"),
        ("some.txt", "neither a folder nor a file of torch's"),
    ],
)
def test_other_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    torch.save({"model": {"a": partial}}, tmp_path / "code.pt")
    with pytest.raises(CheckpointError, match=message):
        read_contents(tmp_path / name)


def test_experts_that_are_not_all_there(tmp_path: Path) -> None:
    save_file({"l.experts.1.w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the experts of 'model/l.experts.w' are not all"):
        with_experts(read_contents(tmp_path), packed=True)
