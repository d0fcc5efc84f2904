"""Published runs that fit and that do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from benchmarks.fidelity.data import DataError
from benchmarks.fidelity.fits import COLUMNS, chosen, main, read_runs
from benchmarks.fidelity.llama import LlamaShape
from merakc.costs.work.kernels import Kernel, KernelKind, Work

# Made up: one sample of a 13B model on 8 GPUs, by two kernels, and what comes of them.
LEAN = "one,13B,1024,8,64,flash_attention2 + RMS kernel,every_layer,1,2,2,1,ok,20.0"
SLOW = "one,13B,1024,8,64,torch,every_layer,1,8,1,0,ok,40.0"
LARGE = "one,13B,1024,8,64,torch,disabled,8,2,2,0,OOM Error,"
NONE = "one,13B,1024,8,64,fused,disabled,8,2,2,0,Kernel not available,"


def written(folder: Path, *lines: str, header: str = ",".join(COLUMNS)) -> Path:
    path = folder / "hagemann.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def test_what_fits_is_told_from_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lean, slow, large = runs = read_runs(written(tmp_path, LEAN, SLOW, LARGE, NONE))
    assert [r.is_to_fit for r in runs] == [True, True, False]
    assert all(r.is_right for r in runs)
    assert chosen(runs) is lean
    assert (slow.strategy.dp, large.strategy.micro_batches) == (1, 4)
    for rows, code in (((LEAN, LARGE), 0), ((LEAN.replace("ok,20.0", "OOM Error,"), SLOW), 1)):
        written(tmp_path, *rows)
        with pytest.raises(typer.Exit) as ended:
            main(tmp_path, None)
        assert ended.value.exit_code == code
    assert "what would be chosen did not fit: one" in " ".join(capsys.readouterr().out.split())


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_runs(tmp_path / "none.csv")
    with pytest.raises(DataError, match="no column pp, sequence_parallel"):
        read_runs(written(tmp_path, header="sheet,model,sequence,gpus,global_batch,kernel,"
                          "activation_checkpointing,micro_batch,tp,outcome,step_s"))  # fmt: skip
    with pytest.raises(DataError, match="csv:2: '7B'"):
        read_runs(written(tmp_path, LEAN.replace("13B", "7B")))


def test_what_autograd_keeps() -> None:
    shape = LlamaShape(64, 4, 3, 96, 32, vocab=100, attention="ops", norm_kernel=False)
    norms, scores = 2 * 2 * 32 * 64 * 6, 2 * 4 * 32 * 32 * 4
    assert shape.block_bytes(2, 1, sequence_parallel=False) == norms + scores
    assert shape.block_bytes(2, 2, sequence_parallel=True) == (norms + scores) // 2
    assert shape.head_bytes(2, 2) == 2 * 32 * (100 * 12 - 50 * 4)


def test_calls_without_a_kernel_of_their_own_take_longer() -> None:
    attention = Kernel(KernelKind.ATTENTION, 100, 10)
    known = Work(Counter({attention: 1}), Counter({attention: 1}))
    lean = LlamaShape(64, 4, 3, 96, 32, vocab=100)

    def traffic(shape: LlamaShape, tp: int = 1) -> tuple[int, int]:
        found = shape.block_work(known, 2, tp, sequence_parallel=tp > 1)
        ways = found.forward, found.backward
        forward, backward = (sum(k.traffic_bytes * n for k, n in way.items()) for way in ways)
        return forward, backward

    elements, gated, scores = 2 * 32 * 64, 2 * 32 * 96, 2 * 4 * 32 * 32
    base = 10 + 2 * 16 * elements + 4 * gated, 10 + 2 * 16 * elements + 8 * gated
    assert traffic(lean) == base
    norms = replace(lean, norm_kernel=False)
    assert traffic(norms) == (base[0] + 2 * 32 * elements, base[1] + 2 * 60 * elements)
    assert traffic(norms, 2) == tuple(10 + (n - 10) // 2 for n in traffic(norms))
    assert traffic(replace(lean, attention="flash 1")) == (base[0] + 10, base[1] + 10)
    assert traffic(replace(lean, attention="ops")) == tuple(n + 9 * scores for n in base)
    assert known.forward == Counter({attention: 1})
