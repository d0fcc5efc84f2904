"""A checkpoint is there whole, or as it was; what others put beside it stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import merakc
from merakc.errors import CheckpointError
from merakc.train.checkpoints import placing
from merakc.train.checkpoints.manifest import NAME
from tests.train.checkpoints.small_runs import trained


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_save_that_is_killed_as_it_is_renamed(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained(0)
    merakc.save(tmp_path / "c", model, extra=1)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.endswith(".writing"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    if exchanges:
        merakc.save(tmp_path / "c", model, extra=2)
        assert merakc.load(tmp_path / "c", model).extra == 2
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
    else:
        monkeypatch.setattr(placing, "_exchanged", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            merakc.save(tmp_path / "c", model, extra=2)
        with pytest.raises(CheckpointError, match=r"rename .*/\.c\.old, which was there before"):
            merakc.load(tmp_path / "c", model)


def test_what_others_put_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    folder, model = tmp_path / "c", nn.Linear(2, 2)
    merakc.save(folder, model, extra={"long": [*range(9)]})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "vocab.txt").symlink_to("../vocab.txt")
    for _ in range(2):
        merakc.save(folder, model)
        assert (folder / "tokenizer.json").read_text() == "{}"
        assert (folder / "vocab.txt").is_symlink()
        merakc.load(folder, model)
    (folder / NAME).write_text("damaged")
    (folder / "notes.md").write_text("mine")
    (folder / "model-00001-of-00002.safetensors").write_text("old")
    merakc.save(folder, model)
    assert {p.name for p in folder.iterdir()} == {
        "model.safetensors", NAME, "tokenizer.json", "vocab.txt", "notes.md"
    }  # fmt: skip
