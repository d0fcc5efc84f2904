"""Rows of published step times."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fidelity.data import (
    COLUMNS,
    CORE_SIZES,
    DataError,
    choose_rows,
    labels,
    published_rows,
    read_rows,
)
from merakc.ir.state import StateShards

SINGLE = "8,16,1,1024,16,24,1024,1,2,4,253.5"
SEVERAL = "512,1536,4,8192,64,48,2048,8,16,4,14750.7"


def written(tmp_path: Path, *lines: str, header: str = ",".join(COLUMNS)) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def test_rows_are_read(tmp_path: Path) -> None:
    single, several = read_rows(written(tmp_path, SINGLE, SEVERAL))
    assert (single.strategy.dp, single.strategy.pp, single.strategy.micro_batches) == (2, 4, 8)
    assert single.step_s == pytest.approx(0.2535)
    assert (single.strategy.recompute, several.strategy.recompute) == ("none", "stage")
    assert several.label == "48 x 8192 tp8 dp16 pp4, 24 x 4"
    assert single.group == (single.shape, 16, 8)


def test_a_column_more_is_no_matter(tmp_path: Path) -> None:
    path = written(tmp_path, f"39.1,{SEVERAL}", header="params_billion," + ",".join(COLUMNS))
    assert read_rows(path)[0].shape.hidden_size == 8192


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("8,16,1,1024,16,24,1024,1,2,4,fast", "rows.csv:2: could not convert"),
        ("8,16,1,1024,16,24,1024,1,2,2,253.5", "rows.csv:2: degrees, batch and time"),
        ("8,17,1,1024,16,24,1024,1,2,4,253.5", "rows.csv:2: degrees, batch and time"),
        ("8,16,1", "rows.csv:2: .*every column holds a number"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_rows(written(tmp_path, line))


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; give the folder"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(DataError, match="no column tp; it needs gpus"):
        read_rows(written(tmp_path, header=",".join(c for c in COLUMNS if c != "tp")))
    with pytest.raises(DataError, match="no such file; give the folder"):
        published_rows(tmp_path / "none.json")


def table(rows: list[dict[str, object]], **more: object) -> dict[str, object]:
    return {"seq_len": 2048, "vocab": 51200, "rows": rows, **more}


def test_papers(tmp_path: Path) -> None:
    size = {"hidden_size": 6144, "layers": 48, "heads": 64, "tp": 8, "pp": 1}
    row = {"model": "22B", **size, "interleave": 1, "micro_batch": 4, "global_batch": 32}
    kept = {"full_recompute_step_s": 1.42, "activations_no_recompute_gib": 59.25}
    core = {"model": "462B", "tp": 8, "pp": 16, "gpus": 6144, "global_batch": 3072, "step_s": 12.72}
    path = tmp_path / "published.json"
    path.write_text(
        json.dumps(
            {
                "narayanan2021": table([{**row, "gpus": 64, "step_s": 2.0}]),
                "korthikanti2022": table([{**row, **kept}], dp=1),
                "megatron_core_h100": table([core], dp=48),
            }
        )
    )
    found = published_rows(path)
    first, second = found["a100-80"]
    assert (first.strategy.dp, first.strategy.micro_batches, first.step_s) == (8, 1, 2.0)
    assert (second.strategy.dp, second.strategy.micro_batches, second.step_s) == (1, 8, 1.42)
    assert second.activation_bytes == 59.25 * 2**30
    (third,) = found["h100"]
    assert third.strategy.chunks == 112 // 16
    assert third.strategy.world_size == 6144
    assert third.strategy.micro_batches == 64
    assert third.strategy.shards(0) == StateShards(1, 1, 48)
    assert third.sequence_parallel


# Megatron-LM's README counts 6 FLOPs a parameter and token, the head's among them, and of attention
# 12 l h s a token. TFLOP/s a GPU, GPUs, seconds and batch are published with the models.
PUBLISHED = {
    "1.7B": (408.8, 48, 0.45, 192),
    "16B": (489.1, 192, 0.85, 192),
    "70B": (419.7, 768, 2.18, 384),
    "177B": (432.8, 2304, 5.26, 1152),
    "462B": (459.9, 6144, 12.72, 3072),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_sizes_of_megatron_core_give_its_flops(model: str) -> None:
    h, layers = CORE_SIZES[model]
    tera, gpus, seconds, batch = PUBLISHED[model]
    s, vocab = 4096, 131072
    token = 6 * (12 * layers * h * h + vocab * h) + 12 * layers * h * s
    assert token * s * batch == pytest.approx(tera * 1e12 * gpus * seconds, rel=0.01)


def test_rows_are_chosen_for_what_they_tell(tmp_path: Path) -> None:
    lines = [
        f"8,{b * 8 // tp * 4},{b},{h},16,{layers},1024,{tp},{8 // tp},1,100"
        for tp, h, b, count in ((1, 1024, 1, 3), (1, 1024, 2, 2), (2, 2048, 1, 4), (8, 1024, 1, 1))
        for layers in range(12, 12 + count)
    ]
    rows = read_rows(written(tmp_path, *lines))
    taken = choose_rows(rows, 4)
    assert len(set(taken)) == 4
    cells = Counter(labels(rows[k], "block")[-1] for k in taken)
    assert set(cells.values()) == {1}
    assert choose_rows(rows, 4) == taken
    assert sorted(choose_rows(rows, 99)) == list(range(10))


def test_labels_go_from_the_general_to_the_particular(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, SEVERAL))
    assert labels(row, "block") == (
        "block, tp 8",
        "block, tp 8, width 8192",
        "block, tp 8, 4 sequences",
        "block, tp 8, width 8192, 4 sequences",
    )
    assert labels(row, "head") == ("head, tp 8",)
