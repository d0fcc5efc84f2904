from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import merakc
from benchmarks.layouts import Task, train_layout, worst_difference
from benchmarks.models import MODELS
from benchmarks.peers.training import Training
from benchmarks.ranks import run_ranks
from benchmarks.reference import train_reference
from merakc.equality.compare import Reference
from merakc.errors import FitError, RecordError
from merakc.ir.program import ActionKind, Mesh
from merakc.machines.cluster import NOMINAL_CPU
from tests.battery.small_models import Words, assert_close, build, gradients, warm_up, words
from tests.frontend.small import Small

ROOT = Path(__file__).resolve().parents[1]
# Of what torch's own pipelining cannot trace or cannot split; tests of other things train the rest.
VARIANTS = ("mistral", "mixtral", "gpt_neox", "whisper", "bart", "opt")
BOUND = 1e-10
SCRIPT = """
import atexit
import os
from pathlib import Path

def tell(text):  # in one piece: the ranks share the pipe
    os.write(1, (text + chr(10)).encode())

def tell_threads():  # runs last
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    tell(f"threads {rank}: {names.count('pt_gloo_runloop')}")

atexit.register(tell_threads)
import torch
import merakc
from tests.battery.small_models import Words, build, words

torch.set_num_threads(1)
model = merakc.auto_parallel(build(Words), words(0), pp=2, micro_batches=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    loss = model(**words(step))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
rank = model.rank
tell(f"rank {rank}: {loss.item():.15g}")
"""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def _parts_of_a_wide_model(overlap: float) -> tuple[int, ...]:
    training = Training(tp=2, layers=1)
    cluster = replace(NOMINAL_CPU, overlap=overlap)
    made = merakc.auto_parallel(training.model(), training.batch(0), tp=2, cluster=cluster)
    return made.plan.sub_batches


def test_communication_is_under_computation_where_machines_can() -> None:
    one, other = run_ranks(2, partial(_parts_of_a_wide_model, 1.0))
    assert one == other
    assert one  # () would be collectives that block
    assert run_ranks(2, partial(_parts_of_a_wide_model, 0.0)) == [(), ()]


def on_two_stages() -> list[Reference]:
    tasks = (
        Task(MODELS[name], Mesh(pp=2), 4, 2, 1, MODELS[name].casts_float32, cluster=NOMINAL_CPU)
        for name in VARIANTS
    )
    return [train_layout(task) for task in tasks]


def test_stock_models_train_on_two_stages() -> None:
    for name, *ranks in zip(VARIANTS, *run_ranks(2, on_two_stages), strict=True):
        case = MODELS[name]
        plain = train_reference(
            case, batch_size=4, micro_batches=2, steps=1, lift_casts=case.casts_float32
        )
        difference = worst_difference(ranks[0], [r.losses for r in ranks], plain, BOUND)
        assert difference.error < BOUND, (name, difference)


def test_models_train_on_parts_of_sequences() -> None:
    case = MODELS["t5"]
    task = Task(case, Mesh(tp=2, pp=2), 4, 2, 1, True, sequence_parallel=True, cluster=NOMINAL_CPU)
    ranks = run_ranks(4, train_layout, task)
    plain = train_reference(case, batch_size=4, micro_batches=2, steps=1, lift_casts=True)
    difference = worst_difference(ranks[0], [r.losses for r in ranks], plain, BOUND)
    assert difference.error < BOUND, difference


def test_what_the_package_gives_is_imported_when_asked_for() -> None:
    assert set(merakc.__all__) <= set(dir(merakc))
    assert all(getattr(merakc, name) is not None for name in merakc.__all__)
    with pytest.raises(AttributeError, match="module 'merakc' has no attribute 'parallel'"):
        merakc.parallel  # noqa: B018


def test_one_process_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    plain, given = build(Words), build(Words)
    model = merakc.auto_parallel(given, words(0))
    loss = model(**words(0))["loss"]
    loss.backward()
    wanted = plain(**words(0))["loss"]
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert_close(model.full_gradients(), gradients(plain))
    assert all(parameter.is_meta for parameter in given.parameters())  # taken over
    assert (model.plan.dp, model.plan.tp, model.plan.pp) == (1, 1, 1)
    prediction = model.plan_file.prediction
    assert prediction is not None
    assert prediction.step_s > 0
    assert model.simulation is not None


def rows_of_own(
    layer: nn.Module, x: torch.Tensor, w: torch.Tensor, *, replacement: bool
) -> torch.Tensor:
    z: torch.Tensor = layer(x.gather(1, torch.multinomial(w, 5, replacement=replacement)))
    return z


def samples_chosen(layer: nn.Module, x: torch.Tensor, w: torch.Tensor, number: int) -> torch.Tensor:
    z: torch.Tensor = layer(x)[torch.multinomial(w[:, 0], number)]
    return z


def drawn_step(pick: Callable[..., torch.Tensor], micro_batches: int) -> tuple[float, torch.Tensor]:
    """The loss and the gradient of a layer of which numbers that are drawn `pick` some."""
    torch.manual_seed(0)
    layer, x, w = nn.Linear(5, 6).double(), torch.randn(8, 5).double(), torch.rand(8, 5) + 0.1
    model = Small(lambda s, x, w: {"loss": pick(s.layer, x, w).square().mean()}, layer=layer)
    made = merakc.auto_parallel(model, {"x": x, "w": w}, micro_batches=micro_batches)
    loss = made(x=x, w=w)["loss"]
    loss.backward()
    return loss.item(), made.full_gradients()["layer.weight"]


@pytest.mark.parametrize(
    "pick",
    [partial(rows_of_own, replacement=False), partial(rows_of_own, replacement=True),
     partial(samples_chosen, number=2)],
    ids=["rows, each once", "rows", "samples"],
)  # fmt: skip
def test_parts_draw_several_numbers_a_row_as_one_batch_does(
    pick: Callable[..., torch.Tensor],
) -> None:
    torch.testing.assert_close(drawn_step(pick, 4), drawn_step(pick, 1), rtol=1e-12, atol=0)


def test_what_is_drawn_reads_the_batch_as_one_part_does() -> None:
    """No part has three samples: weights that are the same for all would key draws otherwise."""
    with pytest.raises(RecordError, match=r"fails for 2 of them.*k not in range"):
        drawn_step(partial(samples_chosen, number=3), 4)


def test_the_predictions_of_a_given_cluster_are_the_same_at_every_run() -> None:
    first, second = (
        merakc.auto_parallel(build(Words), words(0), cluster=NOMINAL_CPU).plan for _ in range(2)
    )
    assert first == second


def test_ranks_started_by_torch_distributed_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain = build(Words)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = plain(**words(step))["loss"]
        loss.backward()
        optimizer.step()
    said = dict(line.split(": ") for line in sorted(done.stdout.splitlines()))
    assert set(said) == {"rank 0", "rank 1", "threads 0", "threads 1"}
    losses = [float(said[f"rank {k}"]) for k in range(2)]
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-12)
    # Those of the default group, which torch's own modules keep; the pipeline's have ended.
    assert all(int(said[f"threads {k}"]) <= 2 for k in range(2))


def chosen() -> tuple[int, int, int, int, str, str]:
    model = merakc.auto_parallel(build(Words), words(0), tp=2, cluster=NOMINAL_CPU)
    plan = model.plan
    return plan.dp, plan.tp, plan.pp, plan.micro_batches, plan.schedule, plan.recompute


def test_what_is_left_open_is_chosen_alike_on_every_rank() -> None:
    plans = run_ranks(4, chosen)
    assert len(set(plans)) == 1
    dp, tp, pp, micro_batches, schedule, recompute = plans[0]
    assert tp == 2
    assert dp * pp == 2
    assert 8 % micro_batches == 0
    assert schedule in ("auto", "1f1b")
    assert recompute in ("none", "full")


def of_the_whole_job() -> tuple[int, int, int, float]:
    """Trains on its part of four samples, where the example has eight."""
    model = merakc.auto_parallel(build(Words), words(0), batch_size=4, dp=2)
    steps = model._own("_steps")
    compiled, own = len(steps.compiled), slice(2 * model.data_parallel_rank, None)
    loss = model(**{k: v[:4][own][:2] for k, v in words(0).items()})["loss"]
    loss.backward()
    return model.plan.batch_size, compiled, len(steps.compiled), loss.item()


def test_a_plan_is_made_for_the_batch_of_the_whole_job() -> None:
    expected = build(Words)(**{k: v[:4] for k, v in words(0).items()})["loss"].item()
    for samples, before, after, loss in run_ranks(2, of_the_whole_job):
        assert samples == 2
        assert before == after == 1
        assert loss == pytest.approx(expected, rel=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    """By the peak of the built step, to the byte; a plan of the user's likewise."""
    options = {"recompute": "none", "micro_batches": 1}
    roomy = merakc.auto_parallel(build(Words), words(0), cluster=NOMINAL_CPU, **options).plan_file
    assert roomy.prediction is not None
    needed = max(roomy.prediction.peak_bytes)
    exact = replace(NOMINAL_CPU, memory_bytes=needed)
    merakc.auto_parallel(build(Words), words(0), cluster=exact, **options)
    small = replace(NOMINAL_CPU, memory_bytes=needed - 1)
    for given in (options, {"plan": roomy}):
        with pytest.raises(FitError, match=r"with dp=1 tp=1 pp=1 a rank needs .* and has"):
            merakc.auto_parallel(build(Words), words(0), cluster=small, **given)
    tiny = replace(NOMINAL_CPU, memory_bytes=needed // 9)
    with pytest.raises(FitError, match=r"needs .* at the least.*such devices would"):
        merakc.auto_parallel(build(Words), words(0), cluster=tiny)


def tight() -> tuple[str, tuple[str, ...], int, dict[str, torch.Tensor]]:
    options = {"pp": 2, "micro_batches": 4, "schedule": "1f1b"}
    roomy = merakc.auto_parallel(build(Words), words(0), cluster=NOMINAL_CPU, **options)
    assert roomy.plan_file.prediction is not None
    memory_bytes = int(0.9 * max(roomy.plan_file.prediction.peak_bytes))
    small = replace(NOMINAL_CPU, memory_bytes=memory_bytes)
    model = merakc.auto_parallel(build(Words), words(0), cluster=small, **options)
    model(**words(0))["loss"].backward()
    kinds = [e.kind for e in model.last_events]
    again = kinds.count(ActionKind.RECOMPUTE)
    return model.plan.recompute, model.plan.kept_blocks, again, model.full_gradients()


def test_stages_recompute_what_they_have_no_memory_for() -> None:
    (recompute, kept, again, full), (_, _, last_again, _) = run_ranks(2, tight)
    assert recompute == "budget"
    assert "again" in kept[0] or "products" in kept[0]
    assert kept[1].endswith("kept")
    assert again == last_again == 0  # no actions: backwards do it
    plain = build(Words)
    plain(**words(0))["loss"].backward()
    assert_close(full, gradients(plain))


class _Shifted(nn.Module):
    """Reads at the last valid position, which a batch of zeros does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        last = ids.gather(1, (ids != 0).sum(1, keepdim=True) - 1)
        return self.table(last).square().mean()


def test_a_model_that_cannot_run_on_zeros_is_predicted_by_formula() -> None:
    model = merakc.auto_parallel(_Shifted(), {"ids": torch.ones(2, 3, dtype=torch.long)})
    assert model.plan_file.prediction is not None
    assert model.plan_file.prediction.step_s > 0
    model(ids=torch.ones(2, 3, dtype=torch.long)).backward()


class Checkpointed(nn.Module):
    """Asks torch to recompute its layers, in one of two ways."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(lambda y, own=layer: own(y).tanh(), x, use_reentrant=self.reentrant)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_forward_that_checkpoints_is_recomputed(reentrant: bool | None) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    model = Checkpointed(reentrant)
    chosen = "none" if reentrant is None else "full"
    assert merakc.plan_for(model, x, cluster=NOMINAL_CPU).recompute == chosen
    assert merakc.plan_for(model, x, recompute="none", cluster=NOMINAL_CPU).recompute == "none"
    assert not any(p.is_meta for p in model.parameters())  # nothing has happened to it


def test_transformers_checkpointing_is_recomputed() -> None:
    model, batch = MODELS["llama"].model().train(), MODELS["llama"].batch(4)
    model.activation_checkpointing_enable()
    assert merakc.plan_for(model, batch, cluster=NOMINAL_CPU).recompute == "full"
