"""Plans checked on local ranks: right ones are equal, broken ones are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from merakc.equality import check
from merakc.equality.check import check_plan, unlike_splits
from merakc.equality.compare import Reference
from merakc.equality.train import Case, train_on_rank
from merakc.errors import ConfigError, PlanError
from merakc.ir.batches import PER_MICRO_BATCH, WHOLE_BATCH, Couplings
from merakc.ir.plan import Plan
from merakc.ir.precision import parse_precision
from merakc.ir.program import Mesh
from merakc.kernels import collectives
from merakc.machines.cluster import NOMINAL_GPU
from merakc.planner.offline import plan_offline
from merakc.planner.request import Request
from merakc.planner.sources.source import Source, load_source, resized, source_of
from merakc.runtime import executor
from merakc.runtime.head import HeadRunner


@cache
def llama() -> Source:
    """Of ten layers, wide enough to be made smaller."""
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
        attention_dropout=0.1,
    )  # fmt: skip
    return source_of("llama", config, 64)


@cache
def small_llama() -> Source:
    """The same as small as it becomes, with casts of its own."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        attention_dropout=0.1,
    )  # fmt: skip
    return source_of("llama", config, 16)


@cache
def two() -> Source:
    return load_source("tests.small_source:small")


def plan_of(source: Source, ranks: int, batch: int, **fixed: object) -> Plan:
    request = Request(ranks, 0, **fixed)  # type: ignore[arg-type]
    return plan_offline(source, request, batch, NOMINAL_GPU)[0].plan


def test_a_plan_of_more_ranks_is_equal_to_one_process_in_a_smaller_model() -> None:
    plan = plan_of(
        llama(), 8, 32, dp=4, pp=2, micro_batches=8, schedule="zb-v", recompute="none",
        state_shards="zero-2",
    )  # fmt: skip
    told: list[str] = []
    result = check_plan(plan, llama(), ranks=4, progress=told.append)
    assert result.equal, result
    checked = result.checked
    assert (checked.dp, checked.pp, checked.schedule) == (2, 2, "zb-v")
    assert str(checked.shards(0)) == "1, 2, 2"
    assert [row.quantity for row in result.rows] == ["loss", "gradients", "weights"]
    assert all(row.limit == 1e-10 for row in result.rows)
    assert result.lowered["num_hidden_layers"] == (10, 8), "two for each of four stages"
    assert result.checked_parameters < result.parameters / 10
    assert any("4 local ranks" in text for text in told)


@cache
def flat() -> Plan:
    """One stage, for what needs no pipeline."""
    return plan_of(two(), 4, 8, dp=2, tp=2, pp=1, micro_batches=2, overlap=0)


def test_mixed_precision_is_compared_in_two_arithmetics() -> None:
    plan = plan_of(
        small_llama(), 2, 8, tp=2, micro_batches=2, recompute="full", sequence_parallel=True,
        precision=parse_precision("bf16-mixed"),
    )  # fmt: skip
    result = check_plan(plan, small_llama(), ranks=2)
    assert result.equal, result
    assert result.checked.sequence_parallel
    limits = {row.arithmetic: row.limit for row in result.rows}
    assert limits == {"float32": 1e-5, "float64": 1e-10}
    errors = {row.arithmetic: row.error for row in result.rows if row.quantity == "gradients"}
    assert errors["float32"] > 1e-10, "it does compute in float32"


def test_products_of_float8_are_compared_with_those_of_one_process() -> None:
    plan = plan_of(small_llama(), 2, 8, tp=2, precision=parse_precision("fp8-mixed"))
    result = check_plan(plan, small_llama(), ranks=2)
    assert result.equal, result
    assert {row.arithmetic: row.limit for row in result.rows} == {"float64, rounded": 1e-10}
    assert result.compared_with.endswith("(its products are of float8)")


def _scale_tangents() -> None:
    plain = executor.Step._tangent
    executor.Step._tangent = lambda *a: plain(*a) * (1 + 1e-8)  # type: ignore[method-assign]


def _scale_all_reduces() -> None:
    plain = collectives.Pending.wait
    collectives.Pending.wait = lambda own: plain(own) * (1 + 1e-8)  # type: ignore[method-assign]


def _tear() -> None:
    raise RuntimeError("torn")


def _broken(fault: Callable[[], None], case: Case) -> Reference:
    fault()
    return train_on_rank(case)


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (_scale_tangents, {"gradients"}),
        (_scale_all_reduces, {"gradients", "weights"}),
    ],
)
def test_a_fault_of_a_hundred_millionth_is_seen(fault: Callable[[], None], kinds: set[str]) -> None:
    result = check_plan(flat(), two(), ranks=2, train=partial(_broken, fault))
    assert not result.equal
    assert kinds <= {row.quantity for row in result.rows if not row.passed}
    assert {row.arithmetic for row in result.rows} == {"float64", "float64, dp=2 alone"}
    assert result.checked.mesh == Mesh(tp=2)
    assert result.replicas is not None
    assert result.replicas.mesh == Mesh(dp=2)
    assert result.lost == ()


def test_ranks_that_fail_are_no_equality() -> None:
    result = check_plan(flat(), two(), ranks=2, train=partial(_broken, _tear))
    assert not result.equal
    assert result.failed in {f"rank {k} failed: RuntimeError: torn" for k in (0, 1)}


class Normed(nn.Module):
    """A batch norm or another, with labels that one half of the batch lacks."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8) if normed else nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.norm(self.up(x))), labels)


def test_a_function_of_the_users_runs_as_it_is() -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(8, 6), torch.arange(8) % 3
    labels[:3] = -100
    batch = {"x": x, "labels": labels}
    source = Source(
        "mine", Normed(normed=True), lambda samples: resized(batch, samples), example=batch
    )
    plan = plan_of(source, 2, 8, dp=2, micro_batches=2)
    result = check_plan(plan, source, ranks=2)
    assert result.equal, result
    assert result.parameters == result.checked_parameters
    assert "the plain model in one process, on the whole batch" in result.compared_with
    assert "batch norm is over each micro-batch" in result.compared_with
    assert any(row.quantity == "buffers" for row in result.rows)


class Pairs(nn.Module):
    """In-batch negatives: each row of one kind is to be told from all others of the batch.

    A parameter that a hook alone knows of, as a closure, scales the one kind.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (
            nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one.register_forward_hook(lambda _, __, out: out * self.scale)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.one(x) @ self.two(y).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@cache
def _pairs(dp: int = 1, couplings: Couplings = WHOLE_BATCH) -> tuple[Source, Plan]:
    x, y = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
    batch = {"x": x, "y": y}
    source = Source("pairs", Pairs(), lambda samples: resized(batch, samples), example=batch)
    fixed = {"dp": dp, "pp": 2, "micro_batches": 2, "couplings": couplings}
    return source, plan_of(source, 2 * dp, 16, **fixed)


def test_what_couples_the_batch_is_equal_with_its_hooks() -> None:
    source, plan = _pairs(dp=2)
    assert plan.head is not None
    result = check_plan(plan, source, ranks=4)
    assert result.equal, result
    assert result.parameters == result.checked_parameters
    assert result.compared_with == "the plain model in one process, on the whole batch"
    assert not any(row.quantity == "buffers" for row in result.rows)


def _scale_heads() -> None:
    plain = HeadRunner._parted
    HeadRunner._parted = lambda own, gradients: plain(  # type: ignore[method-assign]
        own, {name: g * (1 + 1e-8) for name, g in gradients.items()}
    )


def _swap_parts() -> None:
    plain = HeadRunner._parted
    HeadRunner._parted = lambda *a: plain(*a)[::-1]  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [_scale_heads, _swap_parts])
def test_a_fault_of_what_couples_is_seen(fault: Callable[[], None]) -> None:
    source, plan = _pairs()
    result = check_plan(plan, source, ranks=2, train=partial(_broken, fault))
    assert not result.equal
    assert not result.failed
    assert {row.quantity for row in result.rows if not row.passed} >= {"gradients"}
    assert all(row.passed for row in result.rows if row.name.startswith("loss of step 0"))


@pytest.mark.filterwarnings("ignore:by convention")  # as is looked at here
def test_a_coupling_of_each_micro_batch_is_named() -> None:
    source, plan = _pairs(couplings=PER_MICRO_BATCH)
    assert (plan.couplings, plan.head) == (PER_MICRO_BATCH, None)
    result = check_plan(plan, source, ranks=2)
    assert result.equal, result
    assert "micro-batch by micro-batch, averaged, as the plan says: each" in result.compared_with
    assert "test_check.py" in result.compared_with


def test_a_plain_model_that_fails_is_no_equality() -> None:
    class Late(Normed):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if len(x) > 2 and not is_fake(x):  # which no micro-batch is
                raise RuntimeError("torn")
            return super().forward(x, labels)

    batch = {"x": torch.randn(8, 6), "labels": torch.arange(8) % 3}
    source = Source(
        "mine", Late(normed=False), lambda samples: resized(batch, samples), example=batch
    )
    plan = plan_of(source, 2, 8, dp=1, pp=2, micro_batches=2)
    result = check_plan(plan, source, ranks=2)
    assert not result.equal
    assert result.failed == (
        "the plain model in one process, on the whole batch: rank 0 failed: RuntimeError: torn"
    )


def test_numbers_drawn_are_compared_with_one_process_of_merakc() -> None:
    class Noisy(Normed):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x), labels)

    batch = {"x": torch.randn(8, 6), "labels": torch.arange(8) % 3}
    source = Source(
        "mine", Noisy(normed=False), lambda samples: resized(batch, samples), example=batch
    )
    plan = plan_of(source, 2, 8, dp=1, pp=2, micro_batches=2)
    result = check_plan(plan, source, ranks=2)
    assert result.equal, result
    assert "one process of merakc, on the whole batch (the model draws" in result.compared_with


def test_a_large_function_is_refused_with_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5000, 5000), nn.Flatten(0))
    batch = {"input": torch.zeros(2, 5000)}
    source = Source("mine", model, lambda samples: resized(batch, samples), example=batch)
    monkeypatch.setattr(check, "check_source", lambda *_: None)  # it would be another model
    with pytest.raises(ConfigError, match=r"190\.77 MiB in float64, more than the 128\.00 MiB"):
        check_plan(flat(), source, ranks=2)


def test_tensors_that_are_split_otherwise_are_named() -> None:
    name, layout = next(iter(flat().splits.items()))
    other = replace(flat(), splits={**flat().splits, name: "7 x 9*"})
    assert unlike_splits(flat(), flat()) == ()
    smaller = replace(flat(), splits={n: t.replace("16", "32") for n, t in flat().splits.items()})
    assert "16" in layout, layout
    assert unlike_splits(flat(), smaller) == ()
    assert unlike_splits(flat(), other) == (name,) == unlike_splits(other, flat())
    assert unlike_splits(other, replace(flat(), tp=1)) == ()
    both = replace(flat(), cp=4, expert_parallel=True, splits={name: "8*4/2 x 16*2"})
    fewer = replace(both, cp=2, splits={name: "8*2/2 x 32*2"})
    assert unlike_splits(both, fewer) == ()
    assert unlike_splits(both, replace(fewer, tp=1, splits={name: "8* x 32"})) == ()
    assert unlike_splits(both, replace(fewer, tp=1, splits={name: "8 x 32*"})) == (name,)


def test_a_plan_of_another_model_is_refused() -> None:
    other = source_of("gpt2", transformers.GPT2Config(n_layer=2), 16)
    with pytest.raises(PlanError, match=r"another graph \(Two\) than that of gpt2: "):
        check_plan(flat(), other, ranks=2)
