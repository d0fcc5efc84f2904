"""The rows that the cost model is held against: published step times of GPTs, as they were run."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpt import Shape
from merakc.costs.state import Precision
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.planner.job import Framework

FILES = ("vtrain_single_node.csv", "vtrain_multi_node.csv", "published.json")
COLUMNS = (
    "gpus", "global_batch", "micro_batch", "hidden_size", "heads", "layers", "seq_len", "tp", "dp",
    "pp", "step_ms",
)  # fmt: skip
# Megatron-LM's usual vocabulary, which vTrain does not state.
VOCAB = 51200
# Megatron-Core adds gradients up in float32; Megatron-LM before it had them in 16 bits.
IN_FLOAT32 = Precision(2, 4, 12)
NODE = 8
# Megatron-Core's table gives parameters, degrees and FLOP/s, but no sizes. These are the ones whose
# FLOPs, by the repository's formula, are the published ones to within 1 %; heads are 128 wide.
CORE_SIZES = {
    "1.7B": (2048, 24),
    "16B": (6144, 32),
    "70B": (8192, 84),
    "177B": (12288, 96),
    "462B": (18432, 112),
}


class DataError(Exception):
    """A file of rows that is not there, or has other columns."""


@dataclass(frozen=True, slots=True)
class Row:
    """A measured step: the model, how it was laid out and run, and its seconds.

    `activation_bytes` of a rank without recomputation, where they were published.
    """

    source: str
    name: str
    shape: Shape
    strategy: Strategy
    micro_batch: int
    framework: Framework
    step_s: float
    sequence_parallel: bool = False
    activation_bytes: float = 0.0

    @property
    def group(self) -> tuple[Shape, int, int]:
        """Rows of the same model, batch and number of GPUs."""
        batch = self.strategy.dp * self.micro_batch * self.strategy.micro_batches
        return self.shape, batch, self.strategy.world_size

    @property
    def label(self) -> str:
        """The row in a table."""
        d = self.strategy
        chunks = f" x{d.chunks}" if d.chunks > 1 else ""
        return (
            f"{self.name} tp{d.tp} dp{d.dp} pp{d.pp}{chunks}, "
            f"{d.micro_batches} x {self.micro_batch}"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file with vTrain's columns.

    Rows on one node were run without recomputation: the time that their blocks take leaves no room
    for a second forward below the peak rate of an A100. Those on several nodes recompute all of it,
    as in the paper that they follow. Raises `DataError`.
    """
    return [_vtrain(given, where) for where, given in csv_rows(path, COLUMNS)]


def csv_rows(path: Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The rows of a CSV, each behind its file and line. Raises `DataError` where a column lacks."""
    with found(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise DataError(f"{path}: no column {', '.join(missing)}; it needs {','.join(columns)}")
        return [(f"{path}:{k}", row) for k, row in enumerate(reader, 2)]


def found(path: Path) -> Path:
    """A file of the data. Raises `DataError` where there is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give the folder of the data with --data")
    return path


def _vtrain(given: dict[str, str], where: str) -> Row:
    try:
        n = {name: int(float(given[name])) for name in COLUMNS[:-1]}
        step_s = float(given["step_ms"]) / 1e3
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: {error}; every column holds a number") from None
    size = n["dp"] * n["micro_batch"]
    if n["tp"] * n["dp"] * n["pp"] != n["gpus"] or n["global_batch"] % size or step_s <= 0:
        raise DataError(f"{where}: degrees, batch and time do not fit each other: {given}")
    shape = Shape(n["hidden_size"], n["heads"], n["layers"], n["seq_len"], VOCAB)
    strategy = Strategy(
        n["dp"], n["tp"], n["pp"], "dp", micro_batches=n["global_batch"] // size,
        recompute="stage" if n["gpus"] > NODE else "none",
    )  # fmt: skip
    name = f"{shape.layers} x {shape.hidden_size}"
    return Row(
        "vTrain",
        name,
        shape,
        strategy=strategy,
        micro_batch=n["micro_batch"],
        framework=Framework(split_messages=True),
        step_s=step_s,
    )


def published_rows(path: Path) -> dict[str, list[Row]]:
    """The rows of papers by kind of GPU. Raises `DataError`."""
    tables: dict[str, Any] = json.loads(found(path).read_text())
    a100 = [
        _megatron(row, table, name)
        for name, table in (
            ("Narayanan", tables["narayanan2021"]),
            ("Korthikanti", tables["korthikanti2022"]),
        )
        for row in table["rows"]
    ]
    core = tables["megatron_core_h100"]
    return {"a100-80": a100, "h100": [_core(row, core) for row in core["rows"]]}


def _megatron(row: dict[str, Any], table: dict[str, Any], source: str) -> Row:
    """Megatron-LM of 2021 and 2022, everything recomputed."""
    shape = Shape(row["hidden_size"], row["heads"], row["layers"], table["seq_len"], table["vocab"])
    dp = row["gpus"] // (row["tp"] * row["pp"]) if "gpus" in row else table["dp"]
    micro_batches = row["global_batch"] // dp // row["micro_batch"]
    strategy = Strategy(
        dp, row["tp"], row["pp"], "dp", micro_batches=micro_batches, chunks=row["interleave"],
        recompute="stage",
    )  # fmt: skip
    return Row(
        source,
        row["model"],
        shape,
        strategy=strategy,
        micro_batch=row["micro_batch"],
        framework=Framework(split_messages=True),
        step_s=row.get("step_s") or row["full_recompute_step_s"],
        activation_bytes=row.get("activations_no_recompute_gib", 0.0) * 2**30,
    )


def _core(row: dict[str, Any], table: dict[str, Any]) -> Row:
    """Megatron-Core: sequences split over tp, attention in one kernel, nothing recomputed.

    The optimizer's state is sharded over dp, and what is communicated for it runs beside computing.
    The table does not say how a batch is divided: micro-batches of one sequence and stages of one
    layer are assumed.
    """
    hidden_size, layers = CORE_SIZES[row["model"]]
    dp, tp, pp = table["dp"], row["tp"], row["pp"]
    chunks = layers // pp if pp > 1 else 1
    shape = Shape(
        hidden_size, hidden_size // 128, layers, table["seq_len"], table["vocab"], "fused"
    )
    strategy = Strategy(
        dp, tp, pp, "dp", micro_batches=row["global_batch"] // dp, chunks=chunks,
        state_shards=(StateShards(1, 1, dp),) * layers,
    )  # fmt: skip
    return Row(
        "Megatron-Core",
        row["model"],
        shape,
        strategy=strategy,
        micro_batch=1,
        framework=Framework(IN_FLOAT32, 1.0, split_messages=True, tp_overlap=True),
        step_s=row["step_s"],
        sequence_parallel=tp > 1,
    )


def labels(row: Row, kind: str) -> tuple[str, ...]:
    """What a piece of a row shares with those of others, from the general to the particular."""
    place = f"{kind}, tp {row.strategy.tp}"
    width = f"{place}, width {row.shape.hidden_size}"
    if kind != "block":
        return (place,)
    sequences = f"{row.micro_batch} sequences"
    return place, width, f"{place}, {sequences}", f"{width}, {sequences}"


def choose_rows(rows: Sequence[Row], count: int) -> list[int]:
    """Which rows to fit, without a look at their times: those that tell most of the others.

    A row tells of another by the labels of its blocks that both have: the more particular, the
    more; half as much each time that it was told before. How many rows have a label does not count,
    since any layout may be the best of its group. Greedily the row that adds most; among equals,
    the median by the layers of a stage: one where head and blocks weigh as usual.
    """
    own = [labels(row, "block") for row in rows]
    levels = {label: (k + 1) / len(some) for some in own for k, label in enumerate(some)}
    told: Counter[str] = Counter()
    taken: list[int] = []

    def gain(some: tuple[str, ...]) -> float:
        return sum(levels[label] * 0.5 ** told[label] for label in some)

    def size(k: int) -> tuple[float, int, int]:
        strategy = rows[k].strategy
        return rows[k].shape.layers / strategy.pp, strategy.micro_batches, strategy.dp

    while len(taken) < min(count, len(rows)):
        best = max(gain(own[k]) for k in range(len(rows)) if k not in taken)
        ties = [k for k in range(len(rows)) if k not in taken and gain(own[k]) == best]
        pick = sorted(ties, key=size)[len(ties) // 2]
        taken.append(pick)
        told.update(own[pick])
    return taken
