"""Values of a plan that cannot go together: each is refused with its name, value and remedy."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from merakc.errors import PlanError
from merakc.ir.batches import Rows
from merakc.ir.plan import CoupledLoss, OpaqueModule
from merakc.ir.plan_checks import MOST, check_values, first_unlike
from merakc.ir.plan_file import PlanFile
from merakc.ir.state import StateShards
from merakc.machines.cluster import NOMINAL_GPU
from tests.ir.test_plan import PLAN
from tests.ir.test_plan_file import FILE
from tests.report.made import report

FULL = dataclasses.replace(
    PLAN,
    dp=2,
    state_shards=(StateShards(1, 1, 2, 16), StateShards(2, 2, 2)),
    recompute="solved",
    keep_bytes=(-1, 4096),
    sub_batches=(2, 1),
    row_chunks={"head.bias": 2},
    batch_dims={"x": Rows(1), "w": None},
    fused_products=("embed.weight",),
    offload="optimizer",
    host_states=("embed.weight", "head.bias"),
    machines=NOMINAL_GPU,
    opaque_modules=(OpaqueModule("gate", "x.py:1", "control flow", 0.25),),
    head=CoupledLoss(1, "x.py:2", "samples meet", 64),
)


def test_ranks_update_what_they_keep_of_parameters_that_are_fetched() -> None:
    fetched = {"offload": "optimizer, parameters", "host_parameters": ("head.bias",)}
    plan = dataclasses.replace(FULL, **fetched)  # type: ignore[arg-type]
    for shards in ((), (StateShards(2, 2, 2),) * 2):
        check_values(dataclasses.asdict(PlanFile(dataclasses.replace(plan, state_shards=shards))))
    with pytest.raises(PlanError, match="a rank must then update what it keeps of parameters"):
        check_values(dataclasses.asdict(PlanFile(plan)))


def test_sound_values_pass() -> None:
    for plan in (PLAN, FULL, dataclasses.replace(PLAN, batch_size=0)):
        for file in (PlanFile(plan), dataclasses.replace(FILE, decisions=plan)):
            check_values(dataclasses.asdict(file))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (("dp",), 0, "dp is 0; it must be 1 or more"),
        (("micro_batches",), -4, "micro_batches is -4; it must be 1 or more"),
        (("tp",), MOST + 1, f"tp is {MOST + 1}; it must be 1 or more, and at most {MOST}"),
        (("dp",), MOST, f"dp={MOST} x tp=2 x pp=2 are more than {MOST} ranks"),
        (("batch_size",), 7, "batch_size is 7; it must be a multiple of micro_batches, 4"),
        (("batch_size",), -8, "batch_size is -8"),
        (("recompute",), "some", "recompute is 'some'; it must be one of none, full"),
        (("offload",), "all", "offload 'all' is not known; choose none"),
        (("offload",), "auto", "offload is 'auto'; it must be 'activations, optimizer, param"),
        (("offload",), "none", "host_states has 2 entries, and offload is 'none'"),
        (("host_states",), (), "host_states has 0 entries, and offload is 'optimizer'"),
        (("host_states",), ("tail",), "host_states names 'tail'; it must name parameters"),
        (("host_states",), ("head.bias",) * 2, "host_states names parameters twice"),
        (("host_parameters",), ("tail",), "host_parameters has 1 entries, and offload is 'opt"),
        (("pp",), 3, "stages are not the 3 that there are"),
        (("placement",), (0, 2), r"placement is \(0, 2\); it must name each of the 2"),
        (("placement",), (0, 1, 1, 0), "stages are not the 4 that there are"),
        (("stages", 0, "stage"), 1, "stages are not the 2 that there are"),
        (("stages", 0, "stage"), -1, "stages are not the 2 that there are"),
        (("order",), ("0F0",), "order has 1 entries; it must have one for each of 2"),
        (("parameters", "head.bias"), (2,), r"parameters.head.bias is \(2,\); it must be stages"),
        (("parameters", "head.bias"), (), r"parameters.head.bias is \(\)"),
        (("parameters", "head.bias"), (1, 0), r"parameters.head.bias is \(1, 0\).* in order"),
        (("batch_dims", "x", "dim"), -1, "batch_dims.x is .* not negative"),
        (("batch_dims", "x", "inner"), 0, None),
        (("state_shards",), (), None),
        (("state_shards",), ({"optimizer": 2},), "state_shards has 1 entries; it must have none"),
        (("state_shards", 0, "optimizer"), 3, "state_shards.0.optimizer is 3; it must divide dp=2"),
        (("measured", "seconds"), ({},), "measured.seconds has 1 entries for 2 stages"),
        (("measured", "seconds", 0, "F"), -1.0, r"measured.seconds.0.F is -1.0; it must be finite"),
        (("measured", "seconds", 0, "X"), 1.0, "measured.seconds.0.X is 1.0; .* one of F, B, I"),
        (("measured", "link"), (0.0, 1e9), r"measured.link is \(0.0, 1000000000.0\); it must be"),
        (("measured", "messages"), (1.0, float("inf")), "measured.messages is .* above 0"),
        (("measured", "around_s"), -1.0, "measured.around_s is -1.0; it must be finite, and 0"),
        (("keep_bytes",), (), "keep_bytes is empty; with recompute 'solved'"),
        (("keep_bytes", 0), -2, "keep_bytes.0 is -2; it must be bytes, or -1"),
        (("sub_batches",), (2, 2, 1), "sub_batches has 3 entries"),
        (("sub_batches", 1), 3, "sub_batches.1 is 3; it must divide the 2 of a micro-batch"),
        (("sub_batches", 1), 0, "sub_batches.1 is 0"),
        (("sub_batches",), (), "row_chunks has 1 entries; with no sub_batches, none"),
        (("fused_products",), ("tail",), r"fused_products is \('tail',\); it must be parameters'"),
        (("fused_products",), ("embed.weight",) * 2, "fused_products is .* each once, in order"),
        (("row_chunks", "head.bias"), 1, "row_chunks.head.bias is 1; it must be a parameter's"),
        (("row_chunks", "tail"), 2, "row_chunks.tail is 2; it must be a parameter's"),
        (("machines",), None, "machines is null; with sub_batches it must say"),
        (("machines", "flops_per_s"), 0.0, "machines.flops_per_s is 0.0; it must be above 0"),
        (("machines", "link_latency_s"), float("nan"), "machines.link_latency_s is nan"),
        (("prediction", "overlap_gains"), (1.5, 0.0), "overlap_gains.0 is 1.5; .* less than 1"),
        (("prediction", "overlap_gains"), (0.1,), "overlap_gains has 1 entries for 2 stages"),
        (("chunks",), 2, "chunks is 2; it must be 1: 2 stages"),
        (("splits", "embed.weight"), "8 x 4", "splits.embed.weight is '8 x 4'; it must be"),
        (("splits", "embed.weight"), "8* x", "splits.embed.weight is '8. x'"),
        (("splits", "embed.weight"), "08* x 4", "splits.embed.weight is '08. x 4'"),
        (("splits", "embed.weight"), "-8* x 4", "splits.embed.weight is '-8. x 4'"),
        (("splits", "embed.weight"), "(" * 5000, "splits.embed.weight is"),
        (("tp",), 1, "splits has 1 entries; with tp=1 it must have none"),
        (("report", "collectives"), {"all_reduce": -1}, "collectives.all_reduce is -1"),
        (("report", "cut"), {"load": -1.0}, "cut.load is -1.0; it must be finite, and 0 or more"),
        (("prediction", "step_s"), float("nan"), "prediction.step_s is nan"),
        (("prediction", "peak_bytes"), (1,), "prediction.peak_bytes has 1 entries"),
        (("prediction", "exposed_s"), (1.0,), "prediction.exposed_s has 1 entries"),
        (("prediction", "peak_bytes", 1), -1, "prediction.peak_bytes is -1"),
        (("opaque_modules", 0, "flops_share"), 2.0, "opaque_modules.0.flops_share is 2.0"),
        (("head", "stage"), 2, "head.stage is 2; it must be one of the plan's stages"),
        (("head", "waist_bytes"), -1, "head.waist_bytes is -1; it must be 0 or more"),
    ],
)  # fmt: skip
def test_each_fault_is_named(place: tuple[Any, ...], value: Any, text: str | None) -> None:
    told = report() if place[0] == "report" else None
    file = dataclasses.replace(FILE, decisions=FULL, report=told)
    values = copy.deepcopy(dataclasses.asdict(file))
    owner: Any = values if place[0] in values else values["decisions"]
    for key in place[:-1]:
        if isinstance(owner[key], tuple):
            owner[key] = list(owner[key])
        owner = owner[key]
    owner[place[-1]] = value
    if text is None:
        check_values(values)
        return
    with pytest.raises(PlanError, match=f"{text}(.|\n)*make the plan again"):
        check_values(values)


def test_sequences_need_tensor_parallelism() -> None:
    plan = dataclasses.replace(PLAN, tp=1, splits={}, sequence_parallel=True)
    values = dataclasses.asdict(PlanFile(plan))
    with pytest.raises(PlanError, match="sequence_parallel is true; with tp=1"):
        check_values(values)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"cp": 2, "tp": 2, "sequence_parallel": True}, "with tp=2 and cp=2 it must be false"),
        ({"expert_parallel": True}, "cp must then be 2 or more"),
        (
            {"cp": 2, "tp": 4, "expert_parallel": True, "splits": {"embed.weight": "8* x 4"}},
            r"is '8\* x 4'; it must be a layout such as '8\*2/4 x 64\*4'",
        ),
        (
            {"cp": 2, "tp": 4, "expert_parallel": True, "splits": {"embed.weight": "8*4/2 x 4"}},
            r"is '8\*4/2 x 4'; it must be a layout such as",
        ),
        (
            {"cp": 2, "tp": 1, "splits": {"embed.weight": "8*2 x 4"}, "expert_parallel": True},
            r"is '8\*2 x 4'; it must be a layout such as '8",
        ),
        ({"cp": 0}, "cp is 0; it must be 1 or more"),
    ],
    ids=str,
)
def test_what_ranks_share_goes_together(more: dict[str, Any], told: str) -> None:
    plan = dataclasses.replace(PLAN, **more)
    with pytest.raises(PlanError, match=told):
        check_values(dataclasses.asdict(PlanFile(plan)))


@pytest.mark.parametrize(
    ("found", "read", "text"),
    [
        ({"a": 1}, {"a": 1, "b": ()}, ""),
        ({"a": 1}, {"a": 1.0}, ""),
        ({"a": [1, {"b": "x"}]}, {"a": (1, {"b": "x"})}, ""),
        ({"a": {"b": 1}}, {"a": {}}, "a.b is not known; remove it"),
        ({"a": 1.0}, {"a": 1}, "a is 1.0, and must be written as 1"),
        ({"a": True}, {"a": 1}, "a is True, and must be written as 1"),
        ({"a": [0, "4"]}, {"a": (0, 4)}, "a.1 is '4', and must be written as 4"),
        ({"a": [1, 1]}, {"a": (1,)}, "a has 2 entries, and another number was read"),
        ({"a": None}, {"a": ()}, "a is None, and must be written as ()"),
    ],
)
def test_what_a_file_says_otherwise_is_named(found: Any, read: Any, text: str) -> None:
    assert first_unlike(found, read) == text
