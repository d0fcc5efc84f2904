"""`merakc checkpoint`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import merakc
from merakc.cli.app import app
from merakc.train.checkpoints.manifest import read_manifest
from tests.train.checkpoints.small_runs import saved, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "step-2"
    saved(folder, 2, {"seen": 17})
    return folder


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_show(folder: Path) -> None:
    code, text = run("show", folder, "--tensors")
    assert code == 0
    for word in ("Words", "torch.optim.adamw.AdamW", "lr=0.01", "seen", "norm.weight", "float64"):
        assert word in text
    code, text = run("show", folder, "--json")
    assert json.loads(text)["run"]["model"] == "Words"
    code, text = run("show", folder.parent)
    assert code == 2
    assert "is no checkpoint" in text
    assert f"it holds the checkpoints {folder.name}" in " ".join(text.split())


def test_verify(folder: Path, tmp_path: Path) -> None:
    assert run("verify", folder)[0] == 0
    model, _ = trained(0)
    merakc.save(tmp_path / "c", model)
    path = tmp_path / "c" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    code, text = run("verify", tmp_path / "c")
    assert code == 1
    assert "is damaged" in text
    assert run("verify", tmp_path / "none")[0] == 2


def test_convert_and_diff(folder: Path, tmp_path: Path) -> None:
    assert run("convert", folder, tmp_path / "run.pt")[0] == 0
    assert torch.load(tmp_path / "run.pt")["extra"] == {"seen": 17}
    assert run("convert", tmp_path / "run.pt", tmp_path / "back-3.1-8B")[0] == 0
    code, text = run("diff", folder, tmp_path / "back-3.1-8B")
    assert code == 0, text
    assert text.startswith("the same: ")
    assert run("convert", folder, tmp_path / "b", "--dtype", "bfloat16", "--weights-only")[0] == 0
    code, text = run("diff", folder, tmp_path / "b")
    assert code == 1
    assert "bfloat16" in text
    assert "missing" in text
    with_state = len(read_manifest(folder).tensors)
    weights = len(read_manifest(tmp_path / "b").tensors)
    assert f"{weights} tensors differ, of {weights} that both have" in text
    assert f"{with_state - weights} are in one of them alone" in text
    for words in (["x.txt"], ["b"], ["c", "--dtype", "int8"], ["c", "--experts", "packed"]):
        code, text = run("convert", folder, tmp_path / words[0], *words[1:])
        assert code == 2, words
