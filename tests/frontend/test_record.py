"""Recorded models give eager's loss, gradients and buffers; recording leaves the model alone.

The stock models are compared in tests/passes/autodiff/test_differentiate.py.
"""

from __future__ import annotations

import copy
import resource
import threading
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.models import MODELS
from merakc.equality.casts import lifted_casts
from merakc.errors import RecordError
from merakc.frontend.record import Recording, record
from merakc.ir.graph import InputKind, OutputKind
from merakc.kernels.opaque import OPAQUE
from tests.frontend.against_eager import check, inputs_of, run_eager, run_graph
from tests.frontend.small import Small, as_installed, linear, randn

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 6}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 2}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"new_decoder_architecture": False}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {"max_position_embeddings": 40}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_further_families(name: str) -> None:
    config, model_class, own = FAMILIES[name]
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "use_cache": False,
        **own,
    }
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**sizes))
    words = torch.randint(1, 61, (2, 9))
    mask = torch.ones_like(words)
    mask[0, -3:] = 0
    batch = {"input_ids": words, "attention_mask": mask, "labels": words}
    with lifted_casts():
        check(model.double().eval(), **batch, relative=1e-14)


def test_a_mask_that_eager_skips_is_skipped() -> None:
    """Told that it is exported, transformers makes one, and Informer then fails or masks more."""
    sizes = {
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2,
        d_model=16, dropout=0.0, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.InformerForPrediction(config).double().eval()
    past, future = randn(3, 10), randn(3, 4)
    batch = {
        "past_values": past, "past_time_features": randn(3, 10, 2), "future_values": future,
        "past_observed_mask": torch.ones_like(past), "future_time_features": randn(3, 4, 2),
    }  # fmt: skip
    with lifted_casts():
        check(model, **batch, relative=1e-12)


def flags(s: Any, x: Tensor) -> Any:
    """As libraries do: checks that read the batch, unless they are compiled."""
    if not torch.compiler.is_compiling() and bool((x > 100).any()):
        x = x * 2
    return s.layer(x).square().sum()


def test_libraries_are_told_of_an_export_where_they_must_be() -> None:
    check(Small(as_installed(flags), layer=linear()), randn(4, 6))


def test_the_users_own_code_is_never_told_of_an_export() -> None:
    with pytest.raises(RecordError, match="control flow depends on the data"):
        record(Small(in_eager_alone, layer=linear()), (randn(4, 6),), {})


def in_eager_alone(s: Any, x: Tensor) -> Any:
    """What an export would skip: whether eager does it follows from weights."""
    y = s.layer(x)
    if not torch.compiler.is_compiling() and bool((y > -100).any()):
        y = y * 2
    return y.sum()


def test_the_address_of_a_tensor_is_not_to_be_read() -> None:
    model = Small(lambda s, x: s.layer(x).sum() * (1 + (x.data_ptr() == 0)), layer=linear())
    with pytest.raises(RecordError, match=r"test_record.py:\d+: the address of a tensor is read"):
        record(model, (randn(4, 6),), {})


def fails_exported(s: Any, x: Tensor) -> Any:
    """Whose masks, made for an export alone, do not fit."""
    return s.branching(x.view(7) if torch.compiler.is_compiling() else x).square().sum()


def test_an_export_that_fails_says_nothing_of_the_model() -> None:
    def branching(s: Any, x: Tensor) -> Any:
        y = s.layer(x)
        return y * 2 if y.sum() > 0 else y

    model = Small(as_installed(fails_exported), branching=Small(branching, layer=linear()))
    (node,) = [n for n in check(model, randn(4, 6)).graph.nodes if n.op == OPAQUE]
    assert node.module == "branching"


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet"])
def test_export_computes_the_same(name: str) -> None:
    case = MODELS[name]
    model, batch = case.model().eval(), case.batch(2)
    exported = torch.export.export(copy.deepcopy(model), (), dict(batch), strict=False)
    wanted = exported.module()(**batch)["loss"]
    graph = record(model, (), batch).graph
    found = run_graph(graph, inputs_of(graph, model, (), batch))
    torch.testing.assert_close(found.outputs["loss"], wanted.detach(), rtol=1e-6, atol=0)


class Pair(NamedTuple):
    a: Tensor
    b: float


def test_inputs_of_every_form() -> None:
    def forward(
        s: Any, a: Tensor, pair: Pair, skipped: None = None, *more: int, d: Any, flag: bool
    ) -> dict[str, Any]:
        assert skipped is None
        assert flag
        out = s.layer(a) + d["x"]["y"] * d["n"] + pair.a * pair.b + sum(more)
        return {"loss": out.square().mean(), "rest": [a, (3, None, "s")]}

    recording = check(
        Small(forward, layer=linear()), randn(4, 6), Pair(randn(4, 6), 2.0), None, 1, 2,
        d={"x": {"y": randn(4, 6)}, "n": 3}, flag=True,
    )  # fmt: skip
    batch = [i.target for i in recording.graph.inputs if i.kind is InputKind.BATCH]
    assert [batch[0], *batch[2:]] == ["0", "d.x.y"]
    assert recording.outputs[2:] == (3, None, "s")


def test_sizes_and_dtypes_may_be_asked_for() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        kind = next(s.parameters())
        out = s.layer(x.to(kind.dtype)) + torch.arange(6, device=x.device, dtype=kind.dtype)
        total: Tensor = out.sum() / len(x) / x.shape[1] / x.size(0) / x.numel()
        return total

    check(Small(forward, layer=linear()), randn(4, 6).float())


def test_tied_parameters_are_one_input_under_their_first_name() -> None:
    def forward(s: Any, words: Tensor) -> Tensor:
        return nn.functional.cross_entropy(s.head(s.words(words)).flatten(0, 1), words.flatten())

    words = nn.Embedding(7, 6, dtype=torch.float64)
    head = linear(6, 7)
    head.weight = words.weight
    recording = check(Small(forward, words=words, head=head), torch.randint(0, 7, (2, 5)))
    assert recording.aliases == {"head.weight": "words.weight"}
    targets = [i.target for i in recording.graph.inputs if i.kind is InputKind.PARAMETER]
    assert targets == ["words.weight", "head.bias"]


def test_a_module_used_twice() -> None:
    shared = linear()
    model = Small(lambda s, x: s.b(s.a(x)).square().sum(), a=shared, b=shared)
    check(model, randn(4, 6))


@pytest.mark.parametrize("frozen", ["first", "last"])
def test_frozen_parameters_have_no_gradient(frozen: str) -> None:
    model = Small(lambda s, x: s.last(s.first(x)).square().sum(), first=linear(), last=linear())
    model.get_submodule(frozen).requires_grad_(False)
    check(model, randn(4, 6))


def test_parameters_that_nothing_reads_are_no_inputs() -> None:
    model = Small(lambda s, x: s.used(x).square().sum(), used=linear(), unused=linear())
    recording = check(model, randn(4, 6))
    assert all("unused" not in i.target for i in recording.graph.inputs)


def test_detached_parts_have_no_gradient() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        a = s.a(x)
        with torch.no_grad():
            b = s.b(x)
        y: Tensor = a.detach() * s.c(x) + b
        return (y + y.detach() * 2).sum()

    check(Small(forward, a=linear(), b=linear(), c=linear()), randn(4, 6))


def test_the_loss_returned_twice_counts_once() -> None:
    def forward(s: Any, x: Tensor) -> dict[str, Tensor]:
        loss = s.layer(x).square().sum()
        return {"loss": loss, "again": loss}

    graph = check(Small(forward, layer=linear()), randn(4, 6)).graph
    assert [o.kind for o in graph.outputs] == [OutputKind.LOSS, OutputKind.RESULT]


def test_buffers_may_be_replaced() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        s.count = s.count + 1
        out: Tensor = s.layer(x).sum() * s.count
        return out

    model = Small(forward, layer=linear(), count=torch.ones(()))
    recording = check(model, randn(4, 6))
    assert [o.kind for o in recording.graph.outputs] == [OutputKind.LOSS, OutputKind.BUFFER]
    assert torch.equal(model.count, torch.ones(()))


def test_moving_averages() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.layer(x)
        with torch.no_grad():
            s.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        out: Tensor = (y - s.mean).square().sum()
        return out

    check(Small(forward, layer=linear(), mean=torch.zeros(6, dtype=torch.float64)), randn(4, 6))


def test_spectral_norm_writes_its_vectors() -> None:
    layer = nn.utils.parametrizations.spectral_norm(linear())
    graph = check(Small(lambda s, x: s.layer(x).square().sum(), layer=layer), randn(4, 6)).graph
    assert sum(o.kind is OutputKind.BUFFER for o in graph.outputs) == 2


def test_what_a_forward_keeps_in_the_model_is_taken_back() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()
            self.width = 0
            self.cache: Tensor | None = None
            self.table: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.width = x.shape[-1]
            self.cache = torch.arange(6) * 2
            self.table["x"] = x
            self.register_buffer("late", x, persistent=False)
            return (self.layer(x) * self.cache).sum()

    model = Keeps()
    before = dict(vars(model))
    graph = record(model, (randn(4, 6),), {}).graph
    assert all(o.kind is OutputKind.LOSS for o in graph.outputs)
    assert vars(model) == before
    assert model.width == 0
    assert model.table == {}
    assert not dict(model.named_buffers())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if fails:
            raise ValueError("the model's own")
        out: Tensor = s.norm(s.layer(x)).sum()
        return out

    model = Small(forward, layer=linear(), norm=nn.BatchNorm1d(6, dtype=torch.float64))
    model.layer.register_forward_hook(lambda module, args, out: out)
    state = dict((*model.named_parameters(), *model.named_buffers()))
    values = {n: t.detach().clone() for n, t in state.items()}
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    apply = torch.autograd.Function.__dict__["apply"]
    if fails:
        message = r"ValueError: the model's own, at .*test_record.py:\d+; mend it"
        with pytest.raises(RecordError, match=message) as caught:
            record(model, (randn(4, 6),), {})
        assert isinstance(caught.value.__cause__, ValueError)
    else:
        record(model, (randn(4, 6),), {})
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(after[n] is t and torch.equal(t, values[n]) for n, t in state.items())
    assert all(p.grad is None for p in model.parameters())
    assert hooks == [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert torch.is_grad_enabled()
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert not isinstance(torch.ones(1) + 1, FakeTensor)


def test_seven_billion_weights_are_not_made() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=32, vocab_size=32000, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) > 6e9
    words = torch.ones(1, 16, dtype=torch.long)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = record(model, (), {"input_ids": words, "labels": words}).graph
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024
    assert grown_bytes < 1e9  # the weights are 27 of them
    assert sum(n.op == "aten.linear.default" for n in graph.nodes) == 7 * 32 + 1


def test_weights_on_another_device_are_recorded_as_any() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    graph = record(model, (torch.ones(1, 3),), {}).graph
    assert [n.op for n in graph.nodes] == ["aten.linear.default"]


def test_the_loss_of_a_model_in_eval_mode() -> None:
    layer, norm = linear(), nn.BatchNorm1d(6, dtype=torch.float64)
    model = Small(lambda s, x: s.norm(s.layer(x)).square().sum(), layer=layer, norm=norm)
    graph = check(model.eval(), randn(4, 6)).graph
    assert all(o.kind is not OutputKind.BUFFER for o in graph.outputs)


def test_hooks_of_the_user_run() -> None:
    layer = linear()
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, out: out * 2)
    check(Small(lambda s, x: s.layer(x).square().sum(), layer=layer), randn(4, 6))


def test_a_batch_that_requires_a_gradient_is_refused() -> None:
    model = Small(lambda s, x: s.layer(x).sum(), layer=linear())
    with pytest.raises(RecordError, match="tensor '0' of the batch requires a gradient"):
        record(model, (randn(4, 6).requires_grad_(),), {})


def test_a_compiled_module_is_recorded_as_what_it_wraps() -> None:
    model = Small(lambda s, x: s.layer(x).square().sum(), layer=linear())
    check(torch.compile(model, backend="eager"), randn(4, 6))


def test_eager_is_what_the_comparison_runs() -> None:
    """The comparison of this file can fail."""
    model, x = Small(lambda s, x: s.layer(x).square().sum(), layer=linear()), randn(4, 6)
    graph = record(model, (x,), {}).graph
    found = run_graph(graph, inputs_of(graph, model, (x + 1e-9,), {}))
    wanted = run_eager(model, (x,), {})
    assert not torch.equal(found.outputs["output"], wanted.outputs["output"])
    assert not torch.equal(found.gradients["layer.weight"], wanted.gradients["layer.weight"])


def test_two_threads_record_one_after_the_other() -> None:
    inside, finished = threading.Event(), threading.Event()

    class Goes(nn.Module):
        def __init__(self, waits: bool) -> None:
            super().__init__()
            self.waits, self.weight = waits, nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.waits and not inside.is_set():
                inside.set()
                assert not finished.wait(0.5)  # the other one is not recorded meanwhile
            scaled = x * self.weight
            return (scaled if type(scaled) is torch.Tensor else -scaled).sum()

    found: dict[bool, Recording] = {}

    def one(waits: bool) -> None:
        found[waits] = record(Goes(waits), (torch.ones(2, 3),), {})

    first = threading.Thread(target=one, args=(True,))
    first.start()
    assert inside.wait(30)
    one(False)
    finished.set()
    first.join()
    assert found.keys() == {True, False}
    for recording in found.values():
        assert not any("neg" in node.op for node in recording.graph.nodes)
