"""What must hold between the values of a plan, whatever model it is for.

`merakc.lowering.lowered.apply_plan` checks the rest, against the graph. The values are those of
`dataclasses.asdict`, so that this module needs no plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from merakc.errors import ConfigError, PlanError
from merakc.ir.layout import Axis, parse_layout
from merakc.ir.offload import ACTIVATIONS, OPTIMIZER, PARAMETERS, offload_text, parse_offload
from merakc.ir.recompute import IN_BACKWARD, parse_budget, parse_runs

RECOMPUTE = ("none", *IN_BACKWARD, "stage", "solved")
ASKED_RECOMPUTE = ("auto", "none", "selective", "full", "stage")  # what users may say
# More ranks, or micro-batches, than anyone has: beyond, a plan is damaged, and takes hours to read.
MOST = 1 << 20
COMPUTES = ("F", "B", "I", "W", "R", "head")  # `merakc.ir.program.ActionKind`
EVERYTHING = -1  # of what a micro-batch may keep
Values = Mapping[str, Any]


def check_recompute(asked: str) -> None:
    """Raises `ConfigError` for what is no kind of recomputation that users can ask for."""
    if asked not in ASKED_RECOMPUTE and parse_budget(asked) is None:
        raise ConfigError(
            f"recompute {asked!r} is not known; choose one of {', '.join(ASKED_RECOMPUTE)}, what "
            "a rank may hold ('40 GiB'), or a share of what it holds without (0.5)"
        )


def first_unlike(found: Any, read: Any, where: str = "") -> str:
    """Where a file says other things than what was read from it; empty where it says the same.

    Unknown keys are, and numbers in other forms (`4.0`, `true`, `"4"` for 4); a key that is left
    out has its default.
    """
    if isinstance(found, Mapping) and isinstance(read, Mapping):
        for key, value in found.items():
            if key not in read:
                return f"{where}{key} is not known; remove it"
            if text := first_unlike(value, read[key], f"{where}{key}."):
                return text
        return ""
    if isinstance(found, Sequence) and not isinstance(found, str):
        if not isinstance(read, Sequence) or len(found) != len(read):
            return f"{where.rstrip('.')} has {len(found)} entries, and another number was read"
        pairs = enumerate(zip(found, read, strict=True))
        texts = (first_unlike(one, other, f"{where}{k}.") for k, (one, other) in pairs)
        return next((text for text in texts if text), "")
    is_whole = isinstance(found, int) and not isinstance(found, bool)
    as_float = isinstance(read, float) and is_whole  # JSON may write 1.0 as 1
    if (type(found) is type(read) or as_float) and (found == read or found != found):
        return ""
    return f"{where.rstrip('.')} is {found!r}, and must be written as {read!r}"


def check_values(file: Values) -> None:
    """Raises `PlanError`, with the field, its value and what it must be, for a plan that cannot be,
    or where its file says of it what cannot.

    Everything that can be seen without the model is: degrees, the stages and their ranks, the
    lengths of what is given for each, layouts, numbers.
    """
    for text in chain(_problems(file["decisions"]), _beside(file)):  # the first, before others
        raise PlanError(f"{text}; make the plan again")


def _problems(plan: Values) -> Iterator[str]:
    for name in ("dp", "cp", "tp", "pp", "micro_batches"):
        if not 1 <= plan[name] <= MOST:
            yield f"{name} is {plan[name]}; it must be 1 or more, and at most {MOST}"
    dp, cp, tp, pp = (plan[name] for name in ("dp", "cp", "tp", "pp"))
    if dp * cp * tp * pp > MOST:
        along = f" x cp={cp}" * (cp > 1)
        yield f"dp={dp}{along} x tp={tp} x pp={pp} are more than {MOST} ranks"
    m, size = plan["micro_batches"], plan["batch_size"]
    if size < 0 or size % m:
        yield f"batch_size is {size}; it must be a multiple of micro_batches, {m}"
    if plan["recompute"] not in RECOMPUTE:
        yield f"recompute is {plan['recompute']!r}; it must be one of {', '.join(RECOMPUTE)}"
    yield from _offload_problems(plan)
    yield from _stage_problems(plan)
    yield from _lengths(plan, len(plan["placement"]) or plan["pp"])
    yield from _per_stage(plan)
    yield from _layouts(plan)
    yield from _figures(plan)


def _offload_problems(plan: Values) -> Iterator[str]:
    """What lives on the host: of kinds that there are, in the form in which plans write them."""
    offload = plan["offload"]
    try:
        kinds = set(parse_offload(offload).kinds)
    except ConfigError as error:
        yield str(error)
        return
    if offload_text(kinds) != offload:
        yield f"offload is {offload!r}; it must be {offload_text(kinds)!r}"
    for field, kind in (("host_states", OPTIMIZER), ("host_parameters", PARAMETERS)):
        names = plan[field]
        if bool(names) != (kind in kinds):
            yield f"{field} has {len(names)} entries, and offload is {offload!r}"
        for name in names:
            if name not in plan["parameters"]:
                yield f"{field} names {name!r}; it must name parameters of the plan"
        if list(names) != sorted(set(names)):
            yield f"{field} names parameters twice, or not in order"
    shares = plan["host_activations"]
    if bool(shares) != (ACTIVATIONS in kinds):
        yield f"host_activations has {len(shares)} entries, and offload is {offload!r}"
    if shares and plan["recompute"] in ("stage", "solved"):
        yield f"host_activations is given; with recompute '{plan['recompute']}' it must be empty"
    if shares and plan["machines"] is None:
        yield "machines is null; with host_activations it must say what decides the order of nodes"


def _beside(file: Values) -> Iterator[str]:
    """What stands beside the decisions: of as many stages and ranks, in numbers that can be."""
    plan, prediction, measured = file["decisions"], file["prediction"], file["measured"]
    if prediction:
        some = (0, plan["pp"])
        lengths = (
            ("peak_bytes", (plan["pp"],)), ("exposed_s", some), ("host_s", some),
            ("host_left_s", some), ("host_bytes", some),
        )  # fmt: skip
        for name, allowed in lengths:
            if len(prediction[name]) not in allowed:
                yield (
                    f"prediction.{name} has {len(prediction[name])} entries; it must have one for "
                    f"each of {plan['pp']} pipeline ranks"
                )
        yield from _gains(plan, prediction["overlap_gains"])
        figures = {name: value for name, value in prediction.items() if name != "overlap_gains"}
        yield from _not_finite("prediction", figures)
    if measured:
        stages, entries = len(plan["placement"]) or plan["pp"], len(measured["seconds"])
        if entries != stages:
            yield f"measured.seconds has {entries} entries for {stages} stages"
        yield from _measured(measured)
    if file["report"]:
        yield from _report(file["report"])


def _gains(plan: Values, gains: Sequence[float]) -> Iterator[str]:
    """Shares that stages save; of one that costs more so, below zero."""
    stages = len(plan["placement"]) or plan["pp"]
    if len(gains) not in (0, stages):
        yield f"prediction.overlap_gains has {len(gains)} entries for {stages} stages"
    for stage, gain in enumerate(gains):
        if not (math.isfinite(gain) and gain < 1):
            yield f"prediction.overlap_gains.{stage} is {gain}; it must be finite, and less than 1"


def _stage_problems(plan: Values) -> Iterator[str]:
    """The stages, the ranks that hold them, and the parameters that they hold."""
    pp, placement = plan["pp"], plan["placement"]
    if placement and set(placement) != set(range(pp)):
        yield f"placement is {placement}; it must name each of the {pp} pipeline ranks"
        return
    stages = len(placement) or pp
    if {run["stage"] for run in plan["stages"]} != set(range(stages)):
        yield f"stages are not the {stages} that there are, from 0, each with nodes"
    if plan["chunks"] != max(stages // pp, 1):
        yield f"chunks is {plan['chunks']}; it must be {max(stages // pp, 1)}: {stages} stages"
    if plan["order"] and len(plan["order"]) != pp:
        yield f"order has {len(plan['order'])} entries; it must have one for each of {pp} ranks"
    for name, rows in plan["batch_dims"].items():
        if rows is not None and (rows["dim"] < 0 or rows["outer"] < 1 or rows["inner"] < 0):
            yield f"batch_dims.{name} is {rows}; dims and numbers of rows are not negative"
    for name, held in plan["parameters"].items():
        if not held or list(held) != sorted({s for s in held if 0 <= s < stages}):
            yield (
                f"parameters.{name} is {held}; it must be stages of the {stages} that there are, "
                "in order"
            )


def _lengths(plan: Values, stages: int) -> Iterator[str]:
    """Tuples with an entry a stage, or none."""
    for name in ("state_shards", "keep_bytes", "kept_blocks", "sub_batches", "host_activations"):
        if plan[name] and len(plan[name]) != stages:
            yield (
                f"{name} has {len(plan[name])} entries; it must have none, or one for each of "
                f"{stages} stages"
            )
    for recompute, name in (("solved", "keep_bytes"), ("budget", "kept_blocks")):
        if plan["recompute"] == recompute and not plan[name]:
            must = f"with recompute '{recompute}' it must have an entry for each stage"
            yield f"{name} is empty; {must}"


def _per_stage(plan: Values) -> Iterator[str]:
    """What the entries for stages may be."""
    ranks, over = plan["dp"] * plan["cp"], f"dp={plan['dp']}"
    over += f" x cp={plan['cp']}" if plan["cp"] > 1 else ""
    for stage, shards in enumerate(plan["state_shards"]):
        if plan["host_parameters"] and shards["optimizer"] != shards["parameters"]:
            yield "host_parameters is given; a rank must then update what it keeps of parameters"
        if ranks % shards["optimizer"]:
            yield f"state_shards.{stage}.optimizer is {shards['optimizer']}; it must divide {over}"
    for stage, kept in enumerate(plan["keep_bytes"]):
        if kept < EVERYTHING:
            yield f"keep_bytes.{stage} is {kept}; it must be bytes, or {EVERYTHING} for everything"
    for stage, text in enumerate(plan["kept_blocks"]):
        try:
            parse_runs(text)
        except ValueError as error:
            yield f"kept_blocks.{stage}: {error}"
    for stage, share in enumerate(plan["host_activations"]):
        if not 0 <= share <= 1:
            yield f"host_activations.{stage} is {share}; it must be a share, from 0 to 1"
    samples = plan["batch_size"] // plan["micro_batches"]
    for stage, parts in enumerate(plan["sub_batches"]):
        if parts < 1 or (samples and samples % parts):
            yield f"sub_batches.{stage} is {parts}; it must divide the {samples} of a micro-batch"
    for name, count in plan["row_chunks"].items():
        if name not in plan["parameters"] or not 2 <= count <= MOST:
            yield f"row_chunks.{name} is {count}; it must be a parameter's, and 2 or more"
    fused = plan["fused_products"]
    if list(fused) != sorted(set(fused) & set(plan["parameters"])):
        yield f"fused_products is {fused}; it must be parameters' names, each once, in order"
    for name in ("row_chunks", "fused_products"):
        if plan[name] and not plan["sub_batches"]:
            yield f"{name} has {len(plan[name])} entries; with no sub_batches, none"
    overlapped = plan["row_chunks"] or fused or any(parts > 1 for parts in plan["sub_batches"])
    if overlapped and plan["machines"] is None:
        yield "machines is null; with sub_batches it must say what decides the order of nodes"


def _layouts(plan: Values) -> Iterator[str]:
    if plan["tp"] == 1 and plan["splits"] and not plan["expert_parallel"]:
        yield f"splits has {len(plan['splits'])} entries; with tp=1 it must have none"
    if plan["sequence_parallel"] and (plan["tp"] == 1 or plan["cp"] > 1):
        degrees = f"tp={plan['tp']} and cp={plan['cp']}"
        yield f"sequence_parallel is true; with {degrees} it must be false"
    if plan["expert_parallel"] and (plan["cp"] == 1 or not plan["splits"]):
        yield "expert_parallel is true; cp must then be 2 or more, and splits not empty"
    load = plan["expert_load"]
    if load and not (plan["expert_parallel"] and min(load) >= 0 and abs(sum(load) - 1) < 1e-6):
        yield "expert_load is given; it must be shares of 1, and expert_parallel true"
    several = plan["expert_parallel"] and plan["tp"] > 1
    axes = {Axis(plan["tp"], 1), Axis(plan["cp"], plan["tp"])} if several else {None}
    for name, text in plan["splits"].items():
        try:
            found = parse_layout(text)
            good = str(found) == text and found.is_split and min(found.shape, default=1) >= 1
            good = good and found.axes <= axes
            good = good and all(
                0 <= f.on < plan["cp"] for dim in found.dims for f in dim if f.on is not None
            )
        except (ValueError, RecursionError):
            good = False
        if not good:
            such = f"8*{plan['cp']}/{plan['tp']} x 64*{plan['tp']}" if several else "8*·64 x 512"
            yield f"splits.{name} is {text!r}; it must be a layout such as '{such}'"


def _figures(plan: Values) -> Iterator[str]:
    """Numbers that must be finite, and not below zero."""
    for k, module in enumerate(plan["opaque_modules"]):
        if not 0 <= module["flops_share"] <= 1:
            share = module["flops_share"]
            yield f"opaque_modules.{k}.flops_share is {share}; it must be from 0 to 1"
    head = plan["head"]
    if head and not 0 <= head["stage"] < (len(plan["placement"]) or plan["pp"]):
        yield f"head.stage is {head['stage']}; it must be one of the plan's stages"
    if head and head["waist_bytes"] < 0:
        yield f"head.waist_bytes is {head['waist_bytes']}; it must be 0 or more"
    for key, value in (plan["machines"] or {}).items():
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
            yield f"machines.{key} is {value}; it must be finite, and 0 or more"
        if key in ("flops_per_s", "bytes_per_s", "link_bytes_per_s") and not value > 0:
            yield f"machines.{key} is {value}; it must be above 0"


def _not_finite(name: str, figures: Values) -> Iterator[str]:
    """Numbers, alone or several under a key, that are below zero or not finite."""
    for key, value in figures.items():
        for number in value if isinstance(value, Sequence) else (value,):
            if not isinstance(number, str) and not (math.isfinite(number) and number >= 0):
                yield f"{name}.{key} is {number}; it must be finite, and 0 or more"


def _measured(measured: Values) -> Iterator[str]:
    """Numbers of which others are made."""
    for stage, seconds in enumerate(measured["seconds"]):
        for kind, number in seconds.items():
            if kind not in COMPUTES or not (math.isfinite(number) and number >= 0):
                yield (
                    f"measured.seconds.{stage}.{kind} is {number}; it must be finite, 0 or more, "
                    f"and of one of {', '.join(COMPUTES)}"
                )
    if not (math.isfinite(measured["around_s"]) and measured["around_s"] >= 0):
        yield f"measured.around_s is {measured['around_s']}; it must be finite, and 0 or more"
    for name in ("link", "messages"):
        if not all(math.isfinite(number) and number > 0 for number in measured[name] or ()):
            yield f"measured.{name} is {measured[name]}; it must be finite, and above 0"


def _report(report: Values) -> Iterator[str]:
    """What people are shown: numbers are finite, what is divided by is not 0."""
    for name, number in numbers(report, "report"):
        if not math.isfinite(number):
            yield f"{name} is {number}; it must be finite"
    for name in ("collectives", "cut"):
        yield from _not_finite(f"report.{name}", report[name] or {})
    verdict = report["verdict"]
    for name in ("ranks", "peak_flops_per_s", "memory_bytes"):
        if not verdict[name] > 0:
            yield f"report.verdict.{name} is {verdict[name]}; it must be above 0"
    for name in ("ranks", "memory"):
        ranks = [own["rank"] for own in report[name]]
        if not ranks or len(set(ranks)) < len(ranks):
            yield f"report.{name} is of ranks {ranks}; it must be of some, each once"
    left_out_s = report["timeline"]["left_out_s"]
    if left_out_s and not 0 <= left_out_s[0] < left_out_s[1]:
        yield f"report.timeline.left_out_s is {left_out_s}; it must end after it begins"


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers inside a value, with their places."""
    if isinstance(value, Mapping):
        for key, own in value.items():
            yield from numbers(own, f"{name}.{key}")
    elif isinstance(value, (int, float)):
        yield name, value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for k, own in enumerate(value):
            yield from numbers(own, f"{name}.{k}")
