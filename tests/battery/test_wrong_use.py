"""Wrong use: one clear error on every rank, and no rank left waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import (
    ConfigError,
    CutError,
    FitError,
    MerakError,
    MismatchError,
    PlanError,
    ProgramError,
    RecordError,
    ShardError,
)
from merakc.machines.cluster import Cluster
from tests.battery.small_models import WIDTH, Tensors, Words, build, parallel, words

TIMEOUT_S = 20.0


def errors_of(call: Callable[[], object]) -> tuple[type[MerakError], str]:
    """What one rank was told."""
    try:
        call()
    except MerakError as error:
        return type(error), str(error)
    raise AssertionError("nothing was refused")


def refused(world_size: int, call: Callable[[], object]) -> list[tuple[type[MerakError], str]]:
    return run_ranks(world_size, errors_of, call, timeout_s=TIMEOUT_S)


Case = tuple[dict[str, Any], type[MerakError], tuple[str, ...]]
ARGUMENTS: dict[str, Case] = {
    "batch that does not divide": (
        {"micro_batches": 3}, ConfigError, ("batch of 8 samples", "3 micro-batches")),
    "degrees that do not multiply": (
        {"dp": 1, "tp": 3}, ConfigError, ("dp=1 x tp=3", "2 ranks", "product")),
    "negative degree": ({"dp": -2, "tp": -1}, ConfigError, ("dp is -2", "at least 1")),
    "zero micro-batches": ({"micro_batches": 0}, ConfigError, ("0 micro-batches",)),
    "unknown schedule": (
        {"schedule": "2f2b"}, ConfigError, ("schedule '2f2b'", "auto, gpipe, 1f1b")),
    "unknown recompute": (
        {"recompute": "some"}, ConfigError, ("recompute 'some'", "auto, none, selective")),
    "an order that ends in a circle": (
        {"schedule": "0F0 0B0 0F1 0B1; 1F1 1B1 1F0 1B0", "micro_batches": 2, "pp": 2},
        ProgramError, ("deadlock", "rank 0 waits", "rank 1 waits")),
    "an order without a backward": (
        {"schedule": "0F0 0B0; 1F0", "micro_batches": 1, "pp": 2},
        ProgramError, ("rank 1, 1B0", "missing")),
    "an order of other micro-batches": (
        {"schedule": "0F0 0B0; 1F0 1B0", "micro_batches": 2, "pp": 2},
        ConfigError, ("an order of 1 micro-batch on 2 ranks", "2 on 2")),
    "an order beyond the memory": (
        {"schedule": "0F0 0F1 0B0 0B1; 1F0 1F1 1B0 1B1", "micro_batches": 2, "pp": 2,
         "cluster": Cluster("small", 5e10, 1e10, 5e-6, 1000, 2e-4, 1e9)},
        FitError, ("a rank needs", "has 1000 B")),
    "missing plan": ({"plan": "no/such/plan.json"}, PlanError, ("no/such/plan.json",)),
}  # fmt: skip


def all_refused(calls: Iterable[Callable[[], object]]) -> list[list[tuple[type[MerakError], str]]]:
    """By call, what each of two ranks was told; one call after the other on the same ranks."""
    calls = [*calls]
    ranks = run_ranks(2, lambda: [errors_of(call) for call in calls], timeout_s=3 * TIMEOUT_S)
    return [[*told] for told in zip(*ranks, strict=True)]


def test_arguments() -> None:
    calls = (
        partial(merakc.auto_parallel, build(Words), words(0), **options)
        for options, *_ in ARGUMENTS.values()
    )
    for (name, case), told in zip(ARGUMENTS.items(), all_refused(calls), strict=True):
        _, kind, texts = case
        for found, text in told:
            assert found is kind, name
            for part in texts:
                assert part in text, name


def test_arguments_are_refused_before_the_model_is_run() -> None:
    class Untouched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("was run")

    for options in ({"schedule": "2f2b"}, {"recompute": "some"}, {"dp": -1}, {"tp": 2}):
        with pytest.raises(ConfigError):
            merakc.auto_parallel(Untouched(), torch.zeros(4, 2), **options)


def test_batch_without_tensors() -> None:
    batches: tuple[object, ...] = ({}, {"ids": [1, 2]}, torch.zeros(()))
    calls = (partial(merakc.auto_parallel, build(Words), batch) for batch in batches)
    for batch, told in zip(batches, all_refused(calls), strict=True):
        for found, text in told:
            assert found is ConfigError, batch
            assert "no tensor with a batch dim" in text, batch


class Chain(nn.Module):
    """Two calls: it can give no more than two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


def test_more_stages_than_the_graph_gives() -> None:
    call = lambda: merakc.auto_parallel(build(Chain), torch.zeros(8, WIDTH).double(), pp=4)  # noqa: E731
    for found, text in refused(4, call):
        assert found is CutError
        assert "4" in text


class Branch(nn.Module):
    """Its control flow depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.sum() > 0:  # the line that is named
            return y.sum()
        return -y.sum()


def test_control_flow_that_depends_on_the_data() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(k for k, text in enumerate(lines) if text.endswith("# the line that is named"))
    for found, text in refused(2, lambda: merakc.auto_parallel(build(Branch), torch.zeros(4, 8))):
        assert found is RecordError
        assert f"test_wrong_use.py:{line}" in text
        assert "torch.where" in text


def test_no_loss() -> None:
    batch = {"ids": words(0)["ids"]}
    for found, text in refused(2, lambda: merakc.auto_parallel(build(Words), batch, dp=2)):
        assert found is ConfigError
        assert "returns no loss for this batch, and dp=2" in text
        assert "loss=fn" in text


def fails_on_rank_1(error: Exception) -> Callable[[], object]:
    class Fails(Words):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Tensors:
            if dist.get_rank() == 1:
                raise error
            return super().forward(ids, labels)

    return lambda: merakc.auto_parallel(build(Fails), words(0))


def test_a_rank_that_fails_alone() -> None:
    first, second = refused(2, fails_on_rank_1(RecordError("a line of the user's")))
    assert first == (
        MismatchError,
        "rank 1 could not take part: RecordError: a line of the user's",
    )
    assert second == (RecordError, "a line of the user's")


def other_error() -> tuple[str, str]:
    try:
        fails_on_rank_1(ValueError("a bug of the user's"))()
    except MerakError as error:
        return type(error).__name__, str(error)
    raise AssertionError


def test_a_rank_that_fails_with_an_error_of_its_own() -> None:
    first, second = run_ranks(2, other_error, timeout_s=TIMEOUT_S)
    assert first[0] == "MismatchError"
    assert "rank 1 could not take part: ForwardError: the model's forward fails" in first[1]
    assert second[0] == "ForwardError"
    assert all("ValueError: a bug of the user's, at " in text for _, text in (first, second))


DIFFERENT: dict[str, tuple[Callable[[], object], str]] = {
    "blocks": (
        lambda: merakc.auto_parallel(build(lambda: Words(4 + (dist.get_rank() == 2))), words(0)),
        "rank 2",
    ),
    "structure of the batch": (
        lambda: merakc.auto_parallel(
            build(Words), words(0) if dist.get_rank() < 2 else {"ids": words(0)["ids"]}
        ),
        "rank 2",
    ),
    "arguments": (
        lambda: merakc.auto_parallel(build(Words), words(0), seed=int(dist.get_rank() == 1)),
        "rank 1",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_differ(case: tuple[Callable[[], object], str]) -> None:
    call, rank = case
    answers = refused(3, call)
    assert any(kind is MismatchError and rank in text for kind, text in answers)
    assert all(kind in (MismatchError, ConfigError) for kind, _ in answers)


def saved_plan(path: Path, **options: Any) -> None:
    parallel(Words, words(0), micro_batches=2, **options).plan_file.save(path)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    run_ranks(2, lambda: saved_plan(path, pp=2))
    return path


def test_plan_of_another_model(plan_file: Path) -> None:
    for found, text in refused(
        2, lambda: merakc.auto_parallel(build(lambda: Words(5)), words(0), plan=plan_file)
    ):
        assert found is PlanError
        assert "blocks.4" in text


def test_edited_plan(plan_file: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.json"
    body = json.loads(plan_file.read_text())
    body["decisions"]["micro_batches"] = 4
    edited.write_text(json.dumps(body))
    for found, text in refused(
        2, lambda: merakc.auto_parallel(build(Words), words(0), plan=edited)
    ):
        assert found is PlanError
        assert "edited" in text
        assert str(edited) in text


def test_plan_for_another_number_of_ranks(plan_file: Path) -> None:
    for found, text in refused(
        3, lambda: merakc.auto_parallel(build(Words), words(0), plan=plan_file)
    ):
        assert found is ConfigError
        assert "2 ranks (dp=1 x tp=1 x pp=2), 3 were started" in text


def test_arguments_against_the_plan(plan_file: Path) -> None:
    values: dict[str, Any] = {
        "pp": 1, "tp": 2, "micro_batches": 4, "schedule": "gpipe", "recompute": "full",
    }  # fmt: skip
    calls = (
        partial(merakc.auto_parallel, build(Words), words(0), plan=plan_file, **{name: value})
        for name, value in values.items()
    )
    for (name, value), told in zip(values.items(), all_refused(calls), strict=True):
        for found, text in told:
            assert found is ConfigError, name
            assert f"{name}={value} contradicts the plan's {name}=" in text


def test_a_plan_goes_round(plan_file: Path, tmp_path: Path) -> None:
    def again() -> str:
        path = tmp_path / f"plan{dist.get_rank()}.json"
        # Only rank 0 needs to have the file.
        given = plan_file if dist.get_rank() == 0 else "nowhere.json"
        model = merakc.auto_parallel(build(Words), words(0), plan=given)
        model(**words(0))["loss"].backward()
        model.plan_file.save(path)
        return merakc.load_plan(path).hash

    assert run_ranks(2, again) == [merakc.load_plan(plan_file).hash] * 2


class Unsplit(nn.Module):
    """The dim of its parameter is needed whole, and there is no product to be gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.logcumsumexp(self.scale, 0) * x).mean()  # the op that is named


def test_an_op_that_cannot_be_split() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(k for k, text in enumerate(lines) if text.endswith("# the op that is named"))
    for found, text in refused(2, lambda: parallel(Unsplit, {"x": torch.zeros(4, WIDTH)}, tp=2)):
        assert found is ShardError
        assert f"aten.logcumsumexp.default at {__file__}:{line}" in text
        assert "use tp=1" in text


def test_a_process_group_without_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(ConfigError, match="no backend for cpu tensors"):
        merakc.auto_parallel(build(Words), words(0))


def batches_by_global_rank() -> object:
    model = parallel(Words, words(0), tp=2)
    return model(**words(dist.get_rank()))


def test_ranks_of_one_replica_with_different_batches() -> None:
    for found, text in refused(2, batches_by_global_rank):
        assert found is MismatchError
        assert "data_parallel_rank" in text


def test_backward_twice() -> None:
    loss = parallel(Words, words(0))(**words(0))["loss"]
    loss.backward()
    with pytest.raises(ConfigError, match="twice"):
        loss.backward()


def test_unfrozen_after_compilation() -> None:
    def frozen() -> nn.Module:
        model = Words()
        model.norm.requires_grad_(False)
        return model

    model = parallel(frozen, words(0))
    model.get_parameter("norm.weight").requires_grad_()
    with pytest.raises(ConfigError, match=r"'norm\.weight' requires a gradient now"):
        model(**words(0))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -float("inf")])
def test_norm_that_is_none(norm_type: float) -> None:
    with pytest.raises(ConfigError, match="norm_type"):
        parallel(Words, words(0)).clip_grad_norm_(1.0, norm_type)
