"""The text of a plan."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from merakc.ir.plan import CoupledLoss, GraphId, OpaqueModule, Plan, StageRun
from merakc.ir.plan_file import PlanFile, Prediction
from merakc.ir.report import CutReport
from merakc.ir.state import StateShards
from merakc.report.findings import verdict
from merakc.report.terminal import Terminal
from merakc.report.text import plan_table, report_table
from merakc.report.units import format_bytes, format_seconds
from tests.report.made import BUSY, coupled, plan_with_report, report

LAYER_TENSORS = ("attn.qkv.weight", "mlp.up.weight", "norm.weight")


def tiny_plan() -> Plan:
    parameters: dict[str, tuple[int, ...]] = {"embed.weight": (0, 1)}
    parameters |= {f"layers.{i}.{n}": (i // 2,) for i in range(4) for n in LAYER_TENSORS}
    splits = {"embed.weight": "96* x 8"}
    splits |= {f"layers.{i}.attn.qkv.weight": "3·4*·2 x 8" for i in range(4)}
    splits |= {f"layers.{i}.mlp.up.weight": "32* x 8" for i in range(4)}
    return Plan(
        model="tiny [test]",
        dp=1,
        tp=2,
        pp=2,
        batch_size=16,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        graph=GraphId("0123456789abcdef", ()),
        stages=(
            StageRun(0, "n0", "n3", "embed", "layers.1.mlp"),
            StageRun(1, "n4", "n4", "", ""),
            StageRun(1, "n5", "n9", "layers.2.attn", "lm_head"),
        ),
        parameters=parameters,
        splits=splits,
    )


def plan_text(file: PlanFile, width: int = 100) -> str:
    """`plan_table`, and `report_table` where there is one, as plain text without colours.

    Lines have at most `width` columns.
    """
    page = io.StringIO()
    console = Terminal(file=page, width=width)
    if file.report is not None:
        console.print(Text(verdict(file.report.verdict)))
    console.print(plan_table(file))
    if file.report is not None:
        console.print(report_table(file.report, width))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n"


PREDICTED = Prediction(0.0123, 0.2, (3 << 30, 1 << 29))


def tiny_file(prediction: Prediction | None = PREDICTED, **decided: Any) -> PlanFile:
    return PlanFile(replace(tiny_plan(), **decided), prediction)


GOLDEN = """\
╭─ tiny [test] ─────────────────────────────────────────╮
│ mesh       dp 1 x tp 2 x pp 2 = 4 ranks               │
│ batch      16 samples, in 4 micro-batches             │
│ schedule   1f1b                                       │
│ recompute  none                                       │
│ predicted  12.30 ms a step, 20.0% idle, peak 3.00 GiB │
│ plan       {hash}, of graph 0123456789ab        │
╰───────────────────────────────────────────────────────╯
Stages

  stage   modules                    parameter tensors   predicted peak
 ───────────────────────────────────────────────────────────────────────
      0   embed .. layers.1.mlp                      7         3.00 GiB
      1   (model)                                    7       512.00 MiB
          layers.2.attn .. lm_head

Tensors over tp 2

  tensor                     layout (* is split)   count
 ────────────────────────────────────────────────────────
  embed.weight               96* x 8                   1
  layers.*.attn.qkv.weight   3·4*·2 x 8                4
  layers.*.mlp.up.weight     32* x 8                   4
  (all other parameters)     whole                     4

Parameters held by several stages

  parameter      stages   count
 ───────────────────────────────
  embed.weight   0, 1         1

"""


def test_golden() -> None:
    plan = tiny_file()
    assert plan_text(plan) == GOLDEN.replace("{hash}", plan.hash[:12])


CUT = CutReport("dp", 1.0625, 1.03, 3 << 20, 1.25, 5 << 20, 2)
OF_THE_REPORT = """\
tp collectives of a micro-batch

  collective   count
 ────────────────────
  all_reduce      16

Cut into 2 stages (load 1 is even)

  cut                            load   cut bytes   blocks moved
 ────────────────────────────────────────────────────────────────
  chosen: dynamic programming   1.062    3.00 MiB
  METIS' proposal               1.250    5.00 MiB              2
  bound                         1.030

"""


def test_the_cut_and_the_collectives_are_in_the_report() -> None:
    made = replace(report(), cut=CUT, collectives={"all_reduce": 16})
    text = plan_text(replace(tiny_file(), report=made))
    assert OF_THE_REPORT in text
    assert "│ predicted" not in text  # it stands in the first line


def test_sequence_parallelism_is_said_beside_the_degrees() -> None:
    text = plan_text(tiny_file(sequence_parallel=True))
    assert "mesh       dp 1 x tp 2 x pp 2 = 4 ranks, sequence parallel" in text


def test_sharded_state_is_said() -> None:
    shards = StateShards(1, 4, 4), StateShards(4, 4, 4)
    waits = Prediction(1.0, 0.1, (1024, 2048), (0.25, 0.002))
    plan = tiny_file(dp=4, state_shards=shards, prediction=waits)
    text = plan_text(plan)
    assert "1, 4, 4; 4, 4, 4 of parameters, gradients, optimizer state" in text
    assert "250.00 ms waiting for dp" in text
    assert re.search(r"1, 4, 4 +250\.00 ms\n", text)
    assert re.search(r"4, 4, 4 +2\.00 ms\n", text)
    assert re.search(r"4, 4, 4 +-\n", plan_text(replace(plan, prediction=None)))
    assert "waits for dp" not in plan_text(tiny_file())


def test_without_prediction_collectives_or_shared_parameters() -> None:
    parameters = {name: stages[:1] for name, stages in tiny_plan().parameters.items()}
    text = plan_text(tiny_file(prediction=None, parameters=parameters))
    assert "predicted  " not in text
    assert "several stages" not in text
    assert "collective" not in text
    assert "  7                -\n" in text


def test_indices_in_any_place_become_patterns_and_digits_in_words_stay() -> None:
    splits = {f"{i}.fc1.{i}": "8*" for i in range(11)}
    text = plan_text(tiny_file(splits=splits))
    assert "  *.fc1.*                  8*                       11\n" in text


@pytest.mark.parametrize("width", [60, 200])
def test_width_is_kept_and_no_name_is_cut_off(width: int) -> None:
    name = "model." + "deep." * 20 + "weight"
    text = plan_text(tiny_file(splits={name: "8*"}), width)
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(line[2:].split("   ")[0].strip() for line in text.splitlines())
    assert name in joined


def test_units() -> None:
    sizes = (0, 1023, 1536, 3 << 20, 5 << 30, 7 << 40)
    texts = ["0 B", "1023 B", "1.50 KiB", "3.00 MiB", "5.00 GiB", "7.00 TiB"]
    assert [format_bytes(size) for size in sizes] == texts
    times = [format_seconds(t) for t in (12.0, 0.0015, 2.5e-6, 1e-9)]
    assert times == ["12.00 s", "1.50 ms", "2.50 us", "0.00 us"]


def test_ops_kept_whole_are_named_with_their_lines() -> None:
    plan = tiny_file(whole_ops=("aten.sort.default at model.py:12",))
    text = plan_text(plan)
    assert "no sharding rule" in text
    assert "aten.sort.default" in text
    assert "model.py:12" in text
    assert "no sharding rule" not in plan_text(tiny_file())


def test_modules_that_run_as_they_are_share_a_row_by_pattern() -> None:
    modules = tuple(
        OpaqueModule(f"layers.{k}.mlp", "model.py:12", "depends on the data", 0.125)
        for k in range(2)
    )
    assert "as they are" not in plan_text(tiny_file())
    text = plan_text(tiny_file(opaque_modules=modules))
    assert "Run as they are, whole on one stage" in text
    assert re.search(r"layers\.\*\.mlp +model.py:12 +depends on the data +2 +25%\n", text)


def test_a_loss_that_couples_samples_is_named_with_its_line() -> None:
    head = CoupledLoss(1, "model.py:12", "every sample meets every other", 2048)
    assert "whole batch" not in plan_text(tiny_file())
    text = plan_text(tiny_file(head=head))
    assert "Micro-batches wait for the whole batch: the loss couples samples" in text
    assert re.search(r"model.py:12 +every sample meets every other +1 +2.00 KiB\n", text)
    text = plan_text(PlanFile(coupled().plan, report=report(coupled(), BUSY)))
    assert "Beside a step whose micro-batches go on by themselves." in text


def test_all_stages_are_there_with_their_ranks() -> None:
    plan = tiny_file(placement=(0, 1, 1, 0), prediction=Prediction(1.0, 0.1, (1024, 2048)))
    rows = [line.split() for line in plan_text(plan).splitlines()]
    found = [(row[0], row[1], *row[-2:]) for row in rows if row and row[0] in ("2", "3")]
    assert found == [("2", "1", "2.00", "KiB"), ("3", "0", "1.00", "KiB")]


def saves(*gains: float) -> Prediction:
    return replace(PREDICTED, overlap_gains=gains)


def test_overlap_says_in_how_many_parts_and_what_it_saves() -> None:
    made = tiny_file(saves(0.25, 0.125), sub_batches=(2, 2))
    wanted = r"overlap +micro-batches in 2 parts, saves 12\.5% to 25\.0% of a stage "
    assert re.search(wanted, plan_text(made))
    mixed = plan_text(tiny_file(saves(0.25, 0.125), sub_batches=(2, 1)), width=180)
    assert "micro-batches in 2 parts on stage 0, saves 25.0% of a stage; whole " in mixed
    worse = plan_text(tiny_file(saves(-0.1, -0.05), sub_batches=(2, 2)), width=180)
    assert "micro-batches in 2 parts, costs 5.0% to 10.0% of a stage " in worse


def test_overlap_says_how_many_products_are_in_chunks_of_rows() -> None:
    made = tiny_file(sub_batches=(1, 1), row_chunks={"up": 2, "down": 2, "head": 4})
    text = plan_text(made, width=180)
    assert "whole micro-batches; 2 products beside collectives in 2 chunks of rows; 1 " in text


def test_overlap_says_how_many_products_are_fused_with_collectives() -> None:
    made = tiny_file(sub_batches=(1, 1), fused_products=("down", "up"))
    text = plan_text(made, width=180)
    assert "whole micro-batches; 2 products in one op with their collectives" in text


def test_a_report_follows_the_decisions() -> None:
    text = plan_text(plan_with_report(), width=120)
    lines = text.splitlines()
    assert lines[0] == verdict(report(cluster=BUSY).verdict)
    order = [lines.index(title) for title in (
        "Stages", "A micro-batch on each stage", "Schedule",
        "Memory at the peak of each rank, in KiB", "Communication in a step", "What takes longest",
    )]  # fmt: skip
    assert order == sorted(order)
    assert "transformers/models/gpt2/modeling_gpt2.py" in lines


@pytest.mark.parametrize("width", [70, 140])
def test_a_report_keeps_to_the_width(width: int) -> None:
    assert max(map(len, plan_text(plan_with_report(), width).splitlines())) <= width
    assert len(report_table(report(), width).renderables) > 8
