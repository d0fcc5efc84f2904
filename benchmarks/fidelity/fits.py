"""`python -m benchmarks.fidelity.fits`: which published runs fit their GPUs, and which did not.

Runs of Llamas on A100s, a CSV a row each with its layout, kernels and outcome (Hagemann et al.,
arXiv 2311.05610): what is predicted to fit is held against what ran. Exits with 1 where fewer than
`RIGHT` are as predicted, or where a layout that would be chosen ran out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.fidelity.__main__ import BESIDE
from benchmarks.fidelity.data import NODE, DataError, csv_rows
from benchmarks.fidelity.llama import Attention, LlamaShape, llama_pieces
from benchmarks.harness import rich_table
from merakc.costs.ranks import fits
from merakc.ir.state import StateShards
from merakc.ir.strategy import Strategy
from merakc.machines.cluster import Hardware
from merakc.machines.cluster_files import preset
from merakc.planner.estimate import Estimate, estimate_step
from merakc.planner.job import Framework

RIGHT = 0.95
# Hidden size, heads, layers and feed-forward width of the Llamas (arXiv 2302.13971, table 2).
SIZES = {"13B": (5120, 40, 40, 13824), "30B": (6656, 52, 60, 17920), "65B": (8192, 64, 80, 22016)}
VOCAB = 128_000  # which the sheets' own utilization tells
ATTENTION: dict[str, Attention] = {
    "torch": "ops", "fused": "softmax kernel", "flash_attentionv1.0.8": "flash 1",
}  # fmt: skip
RECOMPUTE = {"disabled": "none", "every_layer": "full"}
# Of what a CSV's row may say beside "ok".
OUT_OF_MEMORY, NOT_RUN = "OOM Error", "Kernel not available"
COLUMNS = (
    "sheet", "model", "sequence", "gpus", "global_batch", "kernel", "activation_checkpointing",
    "micro_batch", "tp", "pp", "sequence_parallel", "outcome", "step_s",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A published run: the model, how it was laid out, and its seconds; None if it did not fit."""

    sheet: str
    kernels: str
    shape: LlamaShape
    strategy: Strategy
    micro_batch: int
    step_s: float | None

    @cached_property
    def hardware(self) -> Hardware:
        """Its GPUs."""
        return preset("a100-80", -(-self.strategy.world_size // NODE))

    @cached_property
    def estimate(self) -> Estimate:
        """What the cost model says of it."""
        split = self.strategy.sequence_parallel
        pieces = llama_pieces(
            self.shape, self.micro_batch, self.strategy.tp, sequence_parallel=split
        )
        framework = Framework(overlap=self.hardware.overlap, split_messages=True)
        return estimate_step(pieces, self.strategy, self.hardware, framework)

    @property
    def is_to_fit(self) -> bool:
        """Whether it is predicted to fit."""
        return fits(self.estimate.peak_bytes, self.hardware.flat(), self.strategy.mesh)

    @property
    def is_right(self) -> bool:
        """Whether it did as predicted."""
        return self.is_to_fit == (self.step_s is not None)

    @property
    def label(self) -> str:
        """The run in a table."""
        s = self.strategy
        split = ", sequences split" if s.sequence_parallel else ""
        return f"{self.kernels}, {self.micro_batch} samples, dp{s.dp} tp{s.tp} pp{s.pp}{split}"


def read_runs(path: Path) -> list[Run]:
    """The runs of a CSV of these columns, but those that had no kernel. Raises `DataError`."""
    rows = csv_rows(path, COLUMNS)
    return [_run(row, where) for where, row in rows if row["outcome"] != NOT_RUN]


def _run(row: dict[str, str], where: str) -> Run:
    try:
        hidden_size, heads, layers, feed_forward = SIZES[row["model"]]
        names = ("sequence", "gpus", "global_batch", "micro_batch", "tp", "pp", "sequence_parallel")
        sequence, gpus, batch, samples, tp, pp, split = (int(row[name]) for name in names)
        recompute, ran = RECOMPUTE[row["activation_checkpointing"]], row["outcome"] != OUT_OF_MEMORY
        step_s = float(row["step_s"]) if ran else None
    except (KeyError, ValueError) as error:
        raise DataError(f"{where}: {error}: {row}") from None
    kernel, _, norm = row["kernel"].partition(" + ")
    shape = LlamaShape(
        hidden_size, heads, layers, feed_forward, sequence, VOCAB,
        attention=ATTENTION.get(kernel, "flash"), norm_kernel=bool(norm),
    )  # fmt: skip
    dp = gpus // (tp * pp)
    strategy = Strategy(
        dp, tp, pp, "dp", micro_batches=batch // (dp * samples), recompute=recompute,
        sequence_parallel=bool(split) and tp > 1, state_shards=(StateShards(1, 1, dp),) * pp,
    )  # fmt: skip
    kernels = f"{row['kernel']}, {recompute}"
    return Run(row["sheet"], kernels, shape, strategy, samples, step_s)


def chosen(runs: Sequence[Run]) -> Run:
    """The one that is predicted to be the fastest of those predicted to fit."""
    return min((r for r in runs if r.is_to_fit), key=lambda r: r.estimate.step_s)


def wrong_table(runs: Sequence[Run]) -> Table:
    """The runs that did not do as predicted."""
    rows = [["sheet", "kernels, recomputation, layout", "predicted peak", "it"]]
    rows += [
        [r.sheet, r.label, f"{max(r.estimate.peak_bytes) / 2**30:.1f} GiB",
         "did not fit" if r.is_to_fit else "fitted"]
        for r in runs if not r.is_right
    ]  # fmt: skip
    return rich_table(rows, left=2, title="not as predicted", title_justify="left")


def sheets_table(runs: Sequence[Run]) -> Table:
    """Each sheet: how many fit as predicted, the one that would be chosen, errors of steps."""
    rows = [["sheet", "as predicted", "chosen", "its step", "error of steps, mean and worst"]]
    for sheet in dict.fromkeys(r.sheet for r in runs):
        own = [r for r in runs if r.sheet == sheet]
        best = min(r.step_s for r in own if r.step_s is not None)
        taken = chosen(own)
        slower = "did not fit" if taken.step_s is None else f"{taken.step_s / best - 1:+.1%}"
        errors = [r.estimate.step_s / r.step_s - 1 for r in own if r.step_s is not None]
        rows.append([
            sheet, f"{sum(r.is_right for r in own)} of {len(own)}", taken.label, slower,
            f"{mean(errors):+.1%}, {max(errors, key=abs):+.1%}",
        ])  # fmt: skip
    return rich_table(rows, left=1, title="runs by sheet", title_justify="left")


def steps_table(runs: Sequence[Run]) -> Table:
    """Errors of the steps of each sheet, by kernels and recomputation."""
    rows = [["sheet", "kernels, recomputation", "runs", "mean error", "of any sign", "worst"]]
    for sheet, kernels in dict.fromkeys((r.sheet, r.kernels) for r in runs):
        errors = [
            r.estimate.step_s / r.step_s - 1 for r in runs
            if (r.sheet, r.kernels) == (sheet, kernels) and r.step_s is not None
        ]  # fmt: skip
        if errors:
            rows.append([
                sheet, kernels, str(len(errors)), f"{mean(errors):+.1%}",
                f"{mean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}",
            ])  # fmt: skip
    return rich_table(rows, left=2, title="steps", title_justify="left")


def main(
    data: Annotated[Path, typer.Option(help="The folder of the published runs.")] = BESIDE,
    runs: Annotated[
        list[Path] | None, typer.Option(help="Also check this CSV of the same columns.")
    ] = None,
) -> None:
    """Predicts what fits; exits with 1 where that is missed, with 2 without data."""
    console = Console()
    try:
        found = [r for path in (data / "hagemann.csv", *(runs or [])) for r in read_runs(path)]
    except DataError as error:
        console.print(str(error), style="red")
        raise typer.Exit(2) from None
    with console.status("") as status:
        for k, run in enumerate(found):
            status.update(f"run {k} of {len(found)}")
            assert run.estimate
    console.print(wrong_table(found))
    console.print(sheets_table(found))
    console.print(steps_table(found))
    right = mean(r.is_right for r in found)
    sheets = dict.fromkeys(r.sheet for r in found)
    failed = [s for s in sheets if chosen([r for r in found if r.sheet == s]).step_s is None]
    console.print(f"{right:.1%} of {len(found)} runs as predicted, {RIGHT:.0%} asked")
    if failed:
        console.print(f"what would be chosen did not fit: {', '.join(failed)}")
    raise typer.Exit(int(right < RIGHT or bool(failed)))


if __name__ == "__main__":
    typer.run(main)
