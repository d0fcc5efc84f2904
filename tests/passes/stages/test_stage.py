"""Stages of whole models and of small graphs: what crosses, what is repeated, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from merakc.errors import CutError, PlanError
from merakc.frontend.record import record
from merakc.ir.batches import BatchLayout
from merakc.ir.graph import Graph, InputKind, OutputKind
from merakc.lowering.lowered import TRAINING, training_graph
from merakc.machines.cluster import NOMINAL_CPU
from merakc.machines.cluster_files import preset
from merakc.passes.batches.recorded import in_parts
from merakc.passes.programs.collectives import trained
from merakc.passes.sharding.shard import shard
from merakc.passes.stages.stage import (
    Stages,
    assign_stages,
    shared_nodes,
    split_stages,
    stage_runs,
    stages_of_runs,
    update_nodes,
    value_name,
)
from merakc.passes.stages.transfer import transfer_stages
from tests.coupled_models import ROUTED
from tests.frontend.small import randn
from tests.passes.whole_models import compare, eager, run_eager, run_sharded

MODELS = ("gpt2", "t5", "bart", "resnet", "llama_tied", "vit")


def stages_of(graph: Graph, pp: int, tp: int = 1) -> Stages:
    sharding = shard(graph, tp)
    of, _ = assign_stages(graph, sharding, pp, NOMINAL_CPU)
    return split_stages(graph, of, pp, sharding)


def training(name: str) -> Graph:
    return training_graph(eager(name).recording.graph)


def holders(stages: Stages) -> dict[str, tuple[int, ...]]:
    held: dict[str, tuple[int, ...]] = {}
    for stage, graph in enumerate(stages.graphs):
        for item in graph.inputs:
            if item.kind is InputKind.PARAMETER:
                held[item.target] = (*held.get(item.target, ()), stage)
    return held


@pytest.mark.parametrize("name", ["t5", "resnet"])
def test_one_stage_has_all_but_what_any_may_repeat(name: str) -> None:
    graph = training(name)
    of, report = assign_stages(graph, shard(graph, 1), 1, NOMINAL_CPU)
    assert set(of.values()) == {0}
    assert set(of) == {node.name for node in graph.nodes} - shared_nodes(graph)
    assert (report.load, report.cut_bytes) == (1.0, 0)


def test_cores_that_carry_messages_send_one_where_stages_are_a_little_heavier_for_it() -> None:
    graph = training("llama_tied")
    sharding = shard(graph, 1)
    sent = {}
    for latency_s in (0.0, 1e-4):
        cluster = replace(NOMINAL_CPU, link_latency_s=latency_s, link_bytes_per_s=1e12)
        of, report = assign_stages(graph, sharding, 6, cluster)
        stages = split_stages(graph, of, 6, sharding)
        sent[latency_s] = len(stages.transfers)
        assert report.cut_bytes == sum(t.size_bytes for t in stages.transfers)
    assert sent[1e-4] < sent[0.0]


def test_a_stage_on_a_faster_device_has_more_of_the_graph() -> None:
    graph = training("gpt2")
    sharding, cluster = shard(graph, 1), preset("a100-40").flat("float32")
    slow = preset("a100-40").slowest
    fast = replace(slow, launch_s=slow.launch_s / 3, bytes_per_s=1e13)
    even, report = assign_stages(graph, sharding, 2, cluster, (slow, slow))
    assert (even, report) == assign_stages(graph, sharding, 2, cluster)
    uneven, report = assign_stages(graph, sharding, 2, cluster, (fast, slow))
    assert report.load < 1.2
    assert [*uneven.values()].count(0) > 1.3 * [*even.values()].count(0)
    turned, _ = assign_stages(graph, sharding, 2, cluster, (slow, fast))
    assert [*turned.values()].count(0) < [*even.values()].count(0) / 1.3


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_stages_together_equal_one_process(name: str, pp: int, tp: int) -> None:
    case = eager(name)
    stages = stages_of(training(name), pp, tp)
    for graph in stages.graphs:
        graph.verify()
    compare(case, *run_sharded(case, stages.graphs, stages.sharding))


@pytest.mark.parametrize("name", MODELS)
def test_transfers_are_what_stages_send_and_read(name: str) -> None:
    stages = stages_of(training(name), 4)
    sent = {(o.name, s) for s, g in enumerate(stages.graphs)
            for o in g.outputs if o.kind is OutputKind.ACTIVATION}  # fmt: skip
    read = {(i.name, s) for s, g in enumerate(stages.graphs)
            for i in g.inputs if i.kind is InputKind.ACTIVATION}  # fmt: skip
    assert sent == {(t.value, t.source_stage) for t in stages.transfers}
    assert read == {(t.value, t.target_stage) for t in stages.transfers}
    assert all(t.source_stage < t.target_stage for t in stages.transfers)
    grads = {i.name for g in stages.graphs for i in g.inputs
             if i.kind is InputKind.ACTIVATION and i.requires_grad}  # fmt: skip
    assert grads == {t.value for t in stages.transfers if t.grad}


def test_the_encoders_output_goes_to_every_decoder_stage() -> None:
    case, graph = eager("t5"), training("t5")
    shared = shared_nodes(graph)
    of: dict[str, int] = {}
    for node in graph.nodes:
        if node.name not in shared:
            earlier = max((of[r.node] for r in node.refs if r.node in of), default=0)
            first = 1 if node.module.startswith(("decoder.block.0", "decoder.embed")) else 2
            of[node.name] = max(0 if node.module.startswith("encoder") else first, earlier)
    stages = split_stages(graph, of, 3, shard(graph, 1))
    last = [n.name for n in graph.nodes if n.module == "encoder.final_layer_norm"][-1]
    sent = [t for t in stages.transfers if t.value == f"act:{last}"]
    assert [(t.source_stage, t.target_stage, t.grad) for t in sent] == [(0, 1, True), (0, 2, True)]
    compare(case, *run_sharded(case, stages.graphs, stages.sharding))


def test_masks_and_position_tables_cross_no_boundary() -> None:
    for name in ("llama_tied", "gpt2", "bert"):
        stages = stages_of(training(name), 4)
        assert all(t.grad for t in stages.transfers), name


def test_the_position_bias_is_made_where_it_is_read() -> None:
    graph = training("t5")
    stages = stages_of(graph, 4)
    bias = [n for n in holders(stages) if "relative_attention_bias" in n]
    assert len(bias) == 2
    assert any(len(holders(stages)[n]) > 1 for n in bias)
    crossing = {t.value.removeprefix("act:") for t in stages.transfers}
    made = {n.name for n in graph.nodes if n.op == "aten.embedding.default" and "bias" in n.module}
    assert made
    assert made.isdisjoint(crossing)


def test_tied_weights_are_held_by_both_ends() -> None:
    assert holders(stages_of(training("llama_tied"), 4))["model.embed_tokens.weight"] == (0, 3)


def test_running_statistics_stay_with_their_batch_norm() -> None:
    graph = training("resnet")
    stages = stages_of(graph, 4)
    held = holders(stages)
    written = {o.name: s for s, g in enumerate(stages.graphs)
               for o in g.outputs if o.kind is OutputKind.BUFFER}  # fmt: skip
    assert written
    for name, stage in written.items():
        assert held[name.rpartition(".")[0] + ".weight"] == (stage,)
    assert len(stage_runs(graph, stages.of)) == 4
    assert len(update_nodes(graph)) > 30


@pytest.mark.parametrize("name", MODELS)
def test_runs_give_the_assignment_back(name: str) -> None:
    graph = training(name)
    of = stages_of(graph, 4).of
    assert stages_of_runs(graph, stage_runs(graph, of)) == of


def test_runs_of_another_graph_are_refused() -> None:
    runs = stage_runs(training("gpt2"), stages_of(training("gpt2"), 2).of)
    with pytest.raises(PlanError, match="begins no stage"):
        stages_of_runs(training("bert"), runs)


class Small(nn.Module):
    """A mask from the batch, dropout, and a buffer that the forward writes."""

    seen: Tensor

    def __init__(self, reads_late: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.reads_late = reads_late

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, Tensor]:
        mask = (keep > 0).to(x.dtype).unsqueeze(-1)
        y = self.first(x) * mask
        if not self.reads_late:
            y = y + self.seen
        y = torch.relu(self.last(y)) * mask
        if self.reads_late:
            y = y + self.seen
        with torch.no_grad():
            self.seen.copy_(0.9 * self.seen + (self.first(x) * 0.1).mean(0))
        return {"loss": y.sum()}


def small(model: nn.Module, samples: int = 4) -> Graph:
    batch = {"x": torch.randn(samples, 8), "keep": torch.ones(samples)}
    return training_graph(record(model, (), batch).graph)


def test_shared_nodes_come_from_the_batch_alone() -> None:
    graph = small(Small())
    shared = shared_nodes(graph)
    assert {n.op for n in graph.nodes if n.name in shared} == {
        "aten.gt.Scalar", "aten.to.dtype", "aten.unsqueeze.default",
    }  # fmt: skip


def test_a_buffer_written_by_one_stage_and_read_by_another_is_refused() -> None:
    graph = small(Small(reads_late=True))
    sharding = shard(graph, 1)
    of = dict.fromkeys((n.name for n in graph.nodes if n.name not in shared_nodes(graph)), 0)
    users = graph.users()
    late = [n.name for n in users[next(i.name for i in graph.inputs if i.target == "seen")]]
    of[late[0]] = 1
    for node in graph.nodes:  # everything after the late reader, but not the write
        if node.name not in update_nodes(graph) and any(of.get(r.node) == 1 for r in node.refs):
            of[node.name] = 1
    with pytest.raises(CutError, match="buffer 'seen' is written by stage 0 and read by stages"):
        split_stages(graph, of, 2, sharding)


class Twice(nn.Module):
    """A network with running statistics, called on both of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - self.net(self.net(y))).square().mean()}


@pytest.mark.parametrize("stages", [2, 3])
def test_a_module_on_both_sides_of_a_cut_updates_its_buffers_on_the_later(stages: int) -> None:
    torch.manual_seed(0)
    case = run_eager(Twice().double(), {"x": randn(6, 8), "y": randn(6, 8)})
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 1)
    of, _ = assign_stages(graph, sharding, stages, NOMINAL_CPU)
    norms = [n.name for n in graph.nodes if n.op == "aten.batch_norm.default"]
    assert len({of[name] for name in norms}) > 1
    split = split_stages(graph, of, stages, sharding)
    compare(case, *run_sharded(case, split.graphs, split.sharding))


class Spectral(nn.Module):
    """A spectral norm called on both sides of a cut: two power iterations a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU(),
            nn.Linear(8, 8),
        )  # fmt: skip

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(self.net(self.net(x))).square().mean()}


@pytest.mark.parametrize("stages", [2, 3])
def test_states_that_follow_from_parameters_are_written_where_they_are_read(stages: int) -> None:
    torch.manual_seed(0)
    case = run_eager(Spectral().double(), {"x": randn(6, 8)})
    split = stages_of(training_graph(case.recording.graph), stages)
    assert all(n for n in (len(graph.nodes) for graph in split.graphs))
    compare(case, *run_sharded(case, split.graphs, split.sharding))


class StraightThrough(nn.Module):
    """Codes that stand in for values (VQ-VAE): what is sent on is read detached."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(8, 8), nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        code = self.codes(torch.cdist(y, self.codes.weight).argmin(1))
        loss = (code - y.detach()).square().mean()
        return {"loss": loss + self.last(y + (code - y).detach()).square().mean()}


def test_a_value_is_given_a_gradient_only_by_stages_that_have_one() -> None:
    torch.manual_seed(0)
    case = run_eager(StraightThrough().double(), {"x": randn(6, 8)})
    graph = training_graph(case.recording.graph)
    sharding = shard(graph, 1)
    nodes = [n for n in graph.nodes if n.name not in shared_nodes(graph)]
    found = {n.op: n.name for n in nodes}
    first = next(k for k, n in enumerate(nodes) if n.op == "aten.argmin.default")
    last = next(k for k, n in enumerate(nodes) if n.name == found["aten.sub.Tensor"])
    of = {n.name: (k >= first) + (k >= last) for k, n in enumerate(nodes)}
    split = split_stages(graph, of, 3, sharding)
    flags = {(t.value, t.target_stage): t.grad for t in split.transfers}
    assert not flags["act:embedding", 2]
    assert flags["act:linear", 2]
    compare(case, *run_sharded(case, split.graphs, split.sharding))


def test_too_many_stages_are_refused() -> None:
    graph = small(Small())
    with pytest.raises(CutError, match="at most"):
        assign_stages(graph, shard(graph, 1), 50, NOMINAL_CPU)


class Grown(nn.Module):
    """A value that is much larger than its parameter only where the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        bias = self.bias.expand(x.shape[0], 8) * 1.0
        for layer in self.layers:
            x = torch.relu(layer(x)) + bias
        return {"loss": x.sum()}


def test_stages_make_only_what_they_hold_the_parameters_of() -> None:
    few, many = (
        training_graph(record(Grown(), (), {"x": torch.randn(n, 8)}).graph) for n in (2, 9)
    )
    assert not shared_nodes(few)
    assert shared_nodes(many)
    stages = stages_of(few, 2)
    held = holders(stages)
    assert len(held["bias"]) == 1
    split = split_stages(many, transfer_stages(many, few, stages.of, held), 2, shard(many, 1))
    assert holders(split) == held


@pytest.mark.parametrize("pp", [2, 4])
def test_the_waist_leaves_the_last_stage_that_makes_any_of_it(pp: int) -> None:
    graph = in_parts(ROUTED.record(BatchLayout((8,), 4)), 4, TRAINING).graph
    stages = stages_of(graph, pp)
    refs = {o.ref for o in graph.outputs}
    made = {stages.of[ref.node] for ref in refs}
    assert len(made) > 1
    assert stages.head == max(made)
    for stage, own in enumerate(stages.graphs):
        waist = [o for o in own.outputs if o.kind is OutputKind.WAIST]
        assert len(waist) == (len(refs) if stage == stages.head else 0)
    # Sums of chances have gradients, which come back; how often an expert was chosen has none, nor
    # has the share of it.
    specs = graph.specs()
    sent = {value_name(ref): specs[ref].dtype.is_floating_point for ref in refs}
    found = {t.value: t.grad for t in stages.transfers if t.value in sent}
    assert all(sent[name] for name, has_gradient in found.items() if has_gradient)
    assert set(found.values()) == {False, True}
    assert trained(graph) == {i.target for i in graph.inputs if i.requires_grad}
    assert stages_of(training("gpt2"), 2).head is None
