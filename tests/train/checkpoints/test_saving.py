"""A run that is saved and loaded goes on as if nothing had happened, under any plan."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError, MerakWarning, MismatchError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.health.job import call
from merakc.train.checkpoints import saving, storage
from merakc.train.checkpoints.manifest import NAME, read_manifest
from merakc.train.checkpoints.saving import Saving, saving_group
from merakc.train.checkpoints.storage import Writer
from tests.battery.small_models import Tensors, Words, build, first_part, part, warm_up, words
from tests.train.checkpoints.small_runs import trained


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "micro_batches": 2},
    "dp2": {"dp": 2},
    "zero3": {"dp": 2, "state_shards": "zero-3"},
    "tp2 pp2": {"tp": 2, "pp": 2, "micro_batches": 2},
    "zero2 tp2": {"dp": 2, "tp": 2, "state_shards": "zero-2"},
    "uneven": {"tp": 3},
}
STEPS = 2  # under each plan, before the next goes on


def ranks_of(layout: dict[str, Any]) -> int:
    return layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1)


class Normed(nn.Module):
    """Convolutions with the statistics of batches, which buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Tensors:
        """The mean loss."""
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def images(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, 4, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 3, (8,), generator=generator)}


def make(name: str) -> nn.Module:
    return build(partial(Words, dropout=0.1) if name == "words" else Normed)


def batch_of(name: str, seed: int) -> Tensors:
    return words(seed) if name == "words" else images(seed)


def run(
    name: str,
    layout: dict[str, Any],
    first: int,
    last: int,
    *,
    start: Path | None = None,
    end: Path | None = None,
) -> tuple[list[float], Tensors]:
    """Steps `first` to `last` on the ranks of a layout: losses, and the weights on rank 0."""
    torch.manual_seed(5)
    model = merakc.auto_parallel(
        make(name), first_part(batch_of(name, 0), layout.get("dp", 1)), cluster=NOMINAL_CPU,
        seed=3, **layout,
    )  # fmt: skip
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if start is not None:
        loaded = merakc.load(start, model, optimizer, scheduler)
        assert (loaded.step, loaded.extra) == (first, {"position": first})
    losses = []
    for step in range(first, last):
        loss = model(**part(batch_of(name, step), model))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    if end is not None:
        merakc.save(end, model, optimizer, scheduler, {"position": last})
    return losses, model.full_state_dict()


@pytest.mark.parametrize(
    ("name", "plans", "undisturbed"),
    [
        ("words", ["one", "zero2 tp2", "pp2", "uneven"], "one"),
        ("normed", ["zero3", "dp2"], "dp2"),  # the statistics are those of each dp rank
    ],
)
def test_a_run_goes_on_under_other_plans(
    name: str, plans: list[str], undisturbed: str, tmp_path: Path
) -> None:
    """Each plan goes on with what the one before it has saved."""
    steps, layout = STEPS * len(plans), LAYOUTS[undisturbed]
    wanted_losses, wanted = run_ranks(ranks_of(layout), partial(run, name, layout, 0, steps))[0]
    losses, start = [], None
    for at, plan in enumerate(plans):
        first, end, layout = STEPS * at, tmp_path / f"checkpoint-{at}", LAYOUTS[plan]
        of_plan = partial(run, name, layout, first, first + STEPS, start=start, end=end)
        found, weights = run_ranks(ranks_of(layout), of_plan)[0]
        losses, start = losses + found, end
        assert losses == pytest.approx(wanted_losses[: len(losses)], rel=1e-10), plan
    assert weights.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-10, atol=1e-10, msg=key)


def layouts_of_torch(
    layout: dict[str, Any], first: int, start: Path | None, end: Path, how: str
) -> Tensors:
    """torch's own distributed checkpoint, used as its documentation says."""
    torch.manual_seed(5)
    model = merakc.auto_parallel(
        make("words"), first_part(words(0), layout.get("dp", 1)), cluster=NOMINAL_CPU,
        seed=3, **layout,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=how == "async")
    if start is not None:
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.load(found := {"model": weights, "optimizer": state}, checkpoint_id=start)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"],
            optim_state_dict=found["optimizer"], options=options,
        )  # fmt: skip
        steps = model._own("_steps")
        steps.taken = steps.drawn = first
    for step in range(first, first + STEPS):
        model(**part(words(step), model))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer, options=options)
    written = {"model": weights, "optimizer": state}
    if how == "async":
        dcp.async_save(written, checkpoint_id=end).result()
    else:
        dcp.save(written, checkpoint_id=end)
    return model.full_state_dict()


@pytest.mark.filterwarnings("ignore")  # torch's own, of its own code
def test_torchs_own_checkpoint_goes_to_another_plan(tmp_path: Path) -> None:
    """From each to the next, and what is saved beside the run as well as what is waited for."""
    plans, start = [("pp2", "wait"), ("zero3", "async"), ("tp2", "async")], None
    wanted = run_ranks(1, partial(_undisturbed, STEPS * len(plans)))[0]
    for at, (plan, how) in enumerate(plans):
        layout, end = LAYOUTS[plan], tmp_path / f"checkpoint-{at}"
        of_plan = partial(layouts_of_torch, layout, STEPS * at, start, end, how)
        ours, start = run_ranks(ranks_of(layout), of_plan)[0], end
    for key, value in wanted.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10, msg=key)


def _undisturbed(steps: int) -> Tensors:
    torch.manual_seed(5)
    model = merakc.auto_parallel(make("words"), words(0), cluster=NOMINAL_CPU, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(**words(step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def test_a_save_that_failed_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = nn.Linear(2, 2)
    merakc.save(tmp_path / "file" / "c", model, wait=False)
    with pytest.raises(CheckpointError, match="c was not written"):
        merakc.save(tmp_path / "a", model)
    merakc.save(tmp_path / "b", model)
    failed = merakc.save(tmp_path / "file" / "c", model, wait=False)
    with pytest.raises(CheckpointError, match="c was not written"):
        failed.wait()
    merakc.save(tmp_path / "d", model)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "b", "d"}


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for keep_last in (0, True, 1.5):
        with pytest.raises(CheckpointError, match="at least this checkpoint stays"):
            merakc.save(tmp_path / "c", model, keep_last=keep_last)  # type: ignore[arg-type]
    for folder in (None, model, "/"):
        with pytest.raises(CheckpointError, match="give"):
            merakc.save(folder, model)  # type: ignore[arg-type]
    for options in ({"optimizer": model}, {"optimizer": {}}, {"scheduler": 3}):
        with pytest.raises(CheckpointError, match=r"holds a .*, which has no"):
            merakc.save(tmp_path / "c", model, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="model=str: give the model"):
        merakc.save(tmp_path / "c", "model")  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def unlike(folder: Path) -> None:
    model, rank = nn.Linear(2, 2), dist.get_rank()
    with pytest.raises(MismatchError, match=r"rank 1 has .*wait=False"):
        merakc.save(folder / "a", model, wait=rank == 0)
    with pytest.raises(MismatchError, match=r"rank 1 has .*folder='1'"):
        merakc.save(folder / str(rank), model)
    dist.all_reduce(torch.ones(1), group=saving_group())
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1), group=saving_group())  # of this process group, not of the last


def test_ranks_save_the_same_and_in_the_process_group_that_is_there(tmp_path: Path) -> None:
    run_ranks(2, partial(unlike, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_a_forked_process_saves_beside_what_it_does_as_its_parent_did(tmp_path: Path) -> None:
    """It has neither the thread of its parent's saves, nor anything to wait for."""
    model = nn.Linear(2, 2)
    merakc.save(tmp_path / "parent", model, wait=False).wait(60)

    def run() -> list[str]:
        saved = [merakc.save(tmp_path / name, model, wait=False).wait(60) for name in "ab"]
        return [path.name for path in saved]

    assert run_ranks(1, run, backend="") == [["a", "b"]]


def in_the_midst_of_a_step(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """As the handler of a signal may be, which comes to each rank somewhere else."""
    with (
        pytest.raises(CheckpointError, match=r"inside of model\(\.\.\.\), as the handler of a"),
        call("model(...)"),
    ):
        merakc.save(folder / "handler", model, optimizer)
    model(**part(words(1), model))["loss"].backward()
    if dist.get_rank():
        optimizer.step()
    with pytest.raises(MismatchError, match=r"rank 1 has .*behind 2 losses, after an optimizer"):
        merakc.save(folder / "apart", model, optimizer)
    if not dist.get_rank():
        optimizer.step()
    merakc.save(folder / "after the step", model, optimizer)


def one_without_memory(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> str:
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():
            patched.setattr(saving, "_on_host", no_memory)
        with pytest.raises((MismatchError, RuntimeError)) as caught:
            merakc.save(folder / "memory", model, optimizer, wait=False)
    merakc.save(folder / "enough", model, optimizer, wait=False).wait(60)
    return f"{type(caught.value).__name__}: {caught.value}"


def no_memory(*_: Any) -> None:
    raise RuntimeError("can't allocate memory")


def on_a_disk_of_its_own(folder: Path, model: nn.Module) -> None:
    """As a folder of the same name on each machine is, which no other sees."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder.parent if dist.get_rank() else folder)
        with pytest.raises(CheckpointError, match=r"rank 1: .*c.writing.* storage that all hosts"):
            merakc.save("c", model)


def stopped(folder: Path, model: Any, optimizer: torch.optim.Optimizer, function: str) -> str:
    """Ctrl-C on rank 1 alone, at the first call of one of the writer's functions."""
    original = getattr(storage, function)

    def interrupted(*args: Any) -> Any:
        patched.setattr(storage, function, original)
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank():
            patched.setattr(storage, function, interrupted)
        with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
            merakc.save(folder / "c", model, optimizer)
    return f"{type(caught.value).__name__}: {caught.value}"


def without_its_group(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> str:
    """The thread begins to write after the process group has gone."""
    gone, begin = threading.Event(), saving.write

    def late(*args: Any, **kwargs: Any) -> None:
        assert gone.wait(60)
        begin(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "write", late)
        started = merakc.save(folder / "late", model, optimizer, wait=False)
    dist.destroy_process_group()
    gone.set()
    with pytest.raises(CheckpointError) as caught:
        started.wait(60)
    return str(caught.value)


def hindered(folder: Path) -> dict[str, str]:
    """What each rank is told, of one model, after another."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test process has
    model, optimizer = trained(1, tp=2)
    in_the_midst_of_a_step(folder, model, optimizer)
    told = {"memory": one_without_memory(folder, model, optimizer)}
    on_a_disk_of_its_own(folder, model)
    for function in ("bring_together", "runs_of"):
        told[function] = stopped(folder, model, optimizer, function)
    return {**told, "group": without_its_group(folder, model, optimizer)}


def test_ranks_save_together_or_not_at_all(tmp_path: Path) -> None:
    """Between the same steps, with memory and storage for all, until one is told to stop.

    That is no checkpoint's error, which a loop may catch and go on. Without the process group each
    rank would write its own part for the whole.
    """
    first, second = run_ranks(2, partial(hindered, tmp_path))
    assert first["memory"] == f"MismatchError: rank 1 could not take part: {second['memory']}"
    for function in ("bring_together", "runs_of"):
        assert first[function].endswith("c was not written: rank 1: KeyboardInterrupt:"), function
        assert second[function] == "KeyboardInterrupt: ", function
    for told in (first, second):
        assert "late was not written" in told["group"]
        assert "call wait() on what it returns before" in told["group"]
    assert {p.name for p in tmp_path.iterdir()} == {"after the step", "enough"}


class Slow:
    """A save whose writes wait until they are let go on."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.begun, self.go, write = threading.Event(), threading.Event(), Writer.write_data

        def slow(writer: Writer, *args: Any) -> Any:
            self.begun.set()
            assert self.go.wait(60)
            return write(writer, *args)

        patched.setattr(Writer, "write_data", slow)


def test_warnings_are_heard_while_a_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        started = merakc.save(tmp_path / "c", nn.Linear(2, 2), wait=False)
        assert slow.begun.wait(60)
        warnings.warn("hear me", stacklevel=1)
        slow.go.set()
        started.wait(60)
    assert [str(one.message) for one in heard] == ["hear me"]


def test_a_save_that_nobody_waited_for_to_the_end_keeps_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-C: the next save waits for it, too, before it writes into the same memory."""
    slow, model = Slow(monkeypatch), nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        merakc.save(tmp_path / "a", model, wait=False)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Saving, "wait", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                merakc.save(tmp_path / "b", model, wait=False)
        model.weight.fill_(2.0)
        threading.Timer(0.2, slow.go.set).start()
        merakc.save(tmp_path / "b", model, wait=False).wait(60)
        for name, value in (("a", 1.0), ("b", 2.0)):
            merakc.load(tmp_path / name, model)
            assert torch.equal(model.weight, torch.full((2, 2), value))


def test_a_forked_process_does_not_wait_for_its_parents_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    started = merakc.save(tmp_path / "c", nn.Linear(2, 2), wait=False)

    def run() -> str:
        with pytest.raises(CheckpointError) as caught:
            started.wait(30)
        return str(caught.value)

    (text,) = run_ranks(1, run, backend="")
    assert "c is written by process" in text
    slow.go.set()
    started.wait(60)


def test_exports_are_none_of_a_runs_checkpoints(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    merakc.export(tmp_path / "tuned", model)
    assert merakc.latest(tmp_path) is None
    for name in ("a", "b"):
        merakc.save(tmp_path / name, model, keep_last=1)
    assert {p.name for p in tmp_path.iterdir()} == {"tuned", "b"}
    assert merakc.latest(tmp_path) == tmp_path / "b"


def test_the_newest_checkpoint_is_the_one_saved_last(tmp_path: Path) -> None:
    """And not that of the highest step: a run may have gone back to an older one."""
    model = nn.Linear(2, 2)
    for name in ("step-1", "step-2"):
        merakc.save(tmp_path / name, model)
    abandoned = read_manifest(tmp_path / "step-2")
    abandoned.run["parallel"]["step"] = 2000
    (tmp_path / "step-2" / NAME).write_text(abandoned.text())
    merakc.load(tmp_path / "step-1", model)
    merakc.save(tmp_path / "step-1b", model, keep_last=2)
    assert merakc.latest(tmp_path) == tmp_path / "step-1b"
    assert {p.name for p in tmp_path.iterdir()} == {"step-2", "step-1b"}


def test_keys_that_are_no_text_can_be_kept(tmp_path: Path) -> None:
    """As file names in another encoding, which Python reads as halves of characters."""
    model, key = nn.Linear(2, 2), os.fsdecode(b"caf\xe9.txt")
    merakc.save(tmp_path / "c", model, extra={key: torch.ones(2), "name": key})
    extra = merakc.load(tmp_path / "c", model).extra
    assert torch.equal(extra[key], torch.ones(2))
    assert extra["name"] == key


def test_damaged_checkpoints_are_passed_over_with_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    merakc.save(tmp_path / "a", model)
    merakc.save(tmp_path / "b", model)
    (tmp_path / "b" / NAME).write_text("{}")
    with pytest.warns(MerakWarning, match="passed over: .*b/checkpoint.json is damaged"):
        assert merakc.latest(tmp_path) == tmp_path / "a"


def test_folders_are_where_the_file_system_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "disk" / "runs")
    merakc.save(tmp_path / "runs" / ".." / "c", model)
    assert (tmp_path / "disk" / "c").is_dir()
    merakc.load(tmp_path / "runs" / ".." / "c", model)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for function in (merakc.save, merakc.load, merakc.export):
        with pytest.raises(CheckpointError, match="c: the working directory has gone"):
            function("c", model)  # type: ignore[operator]


def test_folders_that_may_not_be_entered_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merakc.save(tmp_path / "c", nn.Linear(2, 2))
    (tmp_path / "locked").mkdir()
    is_dir = Path.is_dir

    def asked(path: Path) -> bool:
        if path.name == "locked":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", asked)
    assert merakc.latest(tmp_path) == tmp_path / "c"
