"""Checkpoints go to other programs' files and come back."""

from __future__ import annotations

import json
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
from merakc.train.checkpoints.codec import encode
from merakc.train.checkpoints.convert import (
    Contents,
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
    run_ranks(2, partial(saved, folder, 2, {"seen": 17}, tp=2))
    return folder


def same(first: Any, second: Any) -> None:
    assert first.tensors.keys() == second.tensors.keys()
    for name, value in first.tensors.items():
        assert torch.equal(value, second.tensors[name]), name


def test_one_file_is_what_torch_loads(folder: Path, tmp_path: Path) -> None:
    write_torch(read_contents(folder), tmp_path / "run.pt")
    found = torch.load(tmp_path / "run.pt")
    model, optimizer = trained(0)
    model.load_state_dict(found["model"])
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
        ("some.txt", "neither a folder nor a file of torch's .*; give a checkpoint"),
        ("nothing.pt", "holds nothing"),
        ("cut.pt", "cannot be read"),
        ("cut_old.pt", "cannot be read"),
    ],
)
def test_other_files_are_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("no")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    torch.save({"model": {"a": partial}}, tmp_path / "code.pt")
    torch.save({}, tmp_path / "nothing.pt")
    for cut, is_new in (("cut.pt", True), ("cut_old.pt", False)):
        torch.save(
            {"a": torch.ones(9)}, path := tmp_path / cut, _use_new_zipfile_serialization=is_new
        )
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=message):
        read_contents(tmp_path / name)


def test_experts_that_are_not_all_there(tmp_path: Path) -> None:
    save_file({"l.experts.1.w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the experts of 'model/l.experts.w' are not all"):
        with_experts(read_contents(tmp_path), packed=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, at its own loading
def test_files_of_others_give_their_weights_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": "last"}
    torch.save(given, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match=r"no 'optimizer_kinds'.*weights-only"):
        read_contents(tmp_path / "theirs.pt")
    found = read_contents(tmp_path / "theirs.pt", weights_alone=True)
    assert found.tensors.keys() == {"model/weight", "model/bias"}
    torch.save({**given, "optimizer_kinds": [], "parameters": 3, "seed": 0}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="is damaged beside its weights"):
        read_contents(tmp_path / "bad.pt")
    for odd in ({"a": torch.eye(2).to_sparse()}, {1: torch.ones(1)}):
        torch.save(odd, tmp_path / "odd.pt")
        with pytest.raises(CheckpointError, match="no state dict of dense tensors"):
            read_contents(tmp_path / "odd.pt")


def test_folders_of_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    for name in ("optimizer", "extra"):
        save_file({"a": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 other safetensors files"):
        read_contents(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "model.safetensors")
    assert read_contents(tmp_path).tensors.keys() == {"model/b"}


def test_what_ranks_gave_and_loss_scales_are_kept(tmp_path: Path) -> None:
    own = [{"scheduler": [], "extra": encode(torch.ones(1), {}, "extra")} for _ in range(2)]
    scale = {"scale": 8.0, "good_steps": 3, "skipped": 1}
    run = {
        "parameters": [], "optimizers": [], "extras": own,
        "parallel": {"step": 4, "drawn": 7, "seed": 5, "loss_scale": scale},
    }  # fmt: skip
    tensors = {f"extra/rank{rank}.extra": torch.full((2,), float(rank)) for rank in range(2)}
    write_torch(Contents(tensors, run), tmp_path / "new" / "run.pt")
    found = torch.load(tmp_path / "new" / "run.pt")
    assert [float(t[0]) for t in found["extra"]] == [0.0, 1.0]
    assert read_contents(tmp_path / "new" / "run.pt").run["parallel"] == run["parallel"]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"run.pt was not written"):
        write_torch(Contents(tensors, run), tmp_path / "file" / "run.pt")


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    given = {"a": torch.ones(2)}
    torch.save(given, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_contents(tmp_path / "old.bin").tensors["model/a"], given["a"])


def test_an_index_says_what_is_read(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        save_file({"a": torch.tensor(value), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    files = {"a": "one.safetensors", "two": "two.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    found = read_contents(tmp_path).tensors
    assert found.keys() == {"model/a", "model/two"}
    assert found["model/a"] == 1.0
    index.write_text(json.dumps({"weight_map": files | {"three": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"two.safetensors has no 'three', which model"):
        read_contents(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", "null"])
def test_a_config_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        with_dtype(Contents({}, others={"config.json": text}), torch.bfloat16)
