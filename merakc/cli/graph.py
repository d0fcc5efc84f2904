"""`merakc graph`: the recorded graph of a model for tools of other people."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from merakc.batches.split import call_arguments
from merakc.cli.console import (
    SampleTokens,
    TrustCode,
    check_outputs,
    progress_console,
    told,
    working,
)
from merakc.costs.work.flops import node_flops
from merakc.errors import ConfigError
from merakc.frontend.record import record
from merakc.ir.export import Attributes, to_networkx
from merakc.ir.graph import Graph, Ref
from merakc.ir.plan_file import load_plan
from merakc.ir.text import graph_text
from merakc.lowering.lowered import Lowered, training_graph
from merakc.planner.sources.source import load_source
from merakc.planner.what_if import applied
from merakc.report.terminal import Terminal
from merakc.report.units import format_bytes

ENDINGS = (".json", ".graphml", ".txt")


def graph(
    source: Annotated[str, typer.Argument(help="A model, as in `merakc plan`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A .json, .graphml or .txt file.")],
    file: Annotated[
        Path | None,
        typer.Option("--plan", help="A plan of the model, to tell its stages and splits too."),
    ] = None,
    sequence: SampleTokens = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Samples of a micro-batch.", show_default="the plan's, or 1", min=1),
    ] = None,
    trust: TrustCode = False,
) -> None:
    """Write a model's graph, with flops, bytes and lines of source, for networkx and other tools.

    With a plan every node has its stage, and every value the dims that are split over tp. JSON is
    networkx's node-link form; text is what `merakc.ir.text.parse_graph` reads.
    """
    import networkx as nx

    progress = progress_console()
    with told(progress), working(progress, f"reading {source}") as tell:
        if output.suffix not in ENDINGS:
            raise ConfigError(f"-o {output}: its name must end with {' or '.join(ENDINGS)}")
        if file is not None and samples is not None:
            raise ConfigError("--samples and --plan: the plan says how many; give one of them")
        check_outputs(output=output)
        given = load_source(source, sequence, trust_remote_code=trust)
        if file is not None:
            lowered = applied(load_plan(file).decisions, given, tell)
            whole, (stages, splits) = lowered.loss.graph, _decided(lowered)
        else:
            tell(f"recording {given.name}")
            args, kwargs = call_arguments(given.batch(samples or 1))
            whole, stages, splits = training_graph(record(given.model, args, kwargs).graph), {}, {}
        specs = whole.specs()
        values: dict[Ref, Attributes] = {
            r: {"stage": stages.get(r.node, "0"), "split": splits.get(r, "")} for r in specs
        }
        facts: dict[str, Attributes] = {
            n.name: {**values[n.made[0]], "flops": node_flops(n, specs)} for n in whole.nodes
        }
        made = to_networkx(whole, facts, values)
        if output.suffix == ".txt":
            output.write_text(graph_text(whole) + "\n")
        elif output.suffix == ".json":
            output.write_text(json.dumps(nx.node_link_data(made, edges="edges")))
        else:
            nx.write_graphml(made, output)
    Terminal().print(stages_table(whole, facts))
    progress.print(f"written to {output}")


def _decided(lowered: Lowered) -> tuple[dict[str, str], dict[Ref, str]]:
    """The stage of each node, "all" where each that reads it makes it itself; and the dims of each
    value that are split over tp, or over cp.
    """
    whole, sharding = lowered.loss.graph, lowered.stages.sharding
    stages = {n.name: str(lowered.stages.of.get(n.name, "all")) for n in whole.nodes}
    splits: dict[Ref, str] = {}
    for ref in whole.specs():
        layouts = [one.layout_of(ref) for one in (sharding, sharding.context) if one is not None]
        split = {
            k for own in layouts for k, dim in enumerate(own.dims) if any(f.split for f in dim)
        }
        splits[ref] = ",".join(map(str, sorted(split)))
    return stages, splits


def stages_table(whole: Graph, facts: dict[str, Attributes]) -> Table:
    """What each stage computes, and the bytes that come from other stages."""
    specs, of = whole.specs(), {name: str(own["stage"]) for name, own in facts.items()}
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    cut: dict[str, set[Ref]] = defaultdict(set)
    for node in whole.nodes:
        counts[of[node.name]][0] += 1
        counts[of[node.name]][1] += int(facts[node.name]["flops"])
        cut[of[node.name]] |= {r for r in node.refs if of.get(r.node, "all") != of[node.name]}
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("stage", "nodes", "GFLOP forward", "from other stages"):
        table.add_column(head, justify="right")
    for stage in sorted(counts):
        nodes, flops = counts[stage]
        came = [r for r in cut[stage] if of.get(r.node, "all") != "all" and stage != "all"]
        size = sum(specs[r].size_bytes for r in came)
        table.add_row(stage, f"{nodes:,}", f"{flops / 1e9:.3f}", format_bytes(size))
    return table
