"""Lightning: a run is that of one process, also when it goes on elsewhere; what is refused.

All layouts are compared by `benchmarks/loops`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

import merakc
from benchmarks.loops.cells import compared, references
from benchmarks.loops.job import Job, on
from merakc.equality.ranks import run_ranks
from merakc.errors import CheckpointError, ConfigError
from merakc.integrations.lightning import ParallelStrategy, Trainer
from merakc.machines.cluster import NOMINAL_CPU

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own: few workers, no GPU
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "accelerator": "cpu",
}  # fmt: skip


class Module(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.seen = model, torchmetrics.SumMetric()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.model(**batch)
        self.seen.update(len(batch["labels"]))
        self.log("seen", self.seen)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_a_run_is_that_of_one_process(tmp_path: Path) -> None:
    plain = references("Lightning", 2, tmp_path)
    cell = compared("Lightning", "tp2", 2, plain)  # and from its middle on pp2
    assert cell.passed, cell


def together(folder: Path) -> tuple[Any, ...]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    job = Job(folder, on({"dp": 2}), 2, 0, 2)
    module = Module(merakc.auto_parallel(job.model(), job.example, **job.layout))
    trainer = Trainer(max_steps=2, **QUIET)
    first, second = (DataLoader(job.batches(k), batch_size=None) for k in (0, 1))
    trainer.fit(module, first, second)
    strategy, rank = trainer.strategy, module.model.rank
    decided = [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)]
    trainer.save_checkpoint(folder / "saved", weights_only=True)
    merakc.save(folder / "other", module.model)
    with pytest.raises(CheckpointError, match="not written by Lightning"):
        trainer.validate(module, second, ckpt_path=folder / "other", verbose=False)
    trainer.validate(module, second, ckpt_path=folder / "saved", verbose=False)
    found = trainer.callback_metrics["seen"].item()
    return found, strategy.broadcast(rank, src=1), decided, trainer.is_global_zero


def test_ranks_see_all_samples_and_decide_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, together, tmp_path)
    assert first[:3] == second[:3] == (16.0, 1, [False, True])
    assert (first[3], second[3]) == (True, False)
    rank_zero_only.rank = 0


class Averaged(LightningModule):
    """Whose checkpoints hold averages of the weights, once an epoch has ended."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.losses.append((loss := self.model(**batch)).item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.losses.append(self.model(**batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.model.parameters(), lr=0.1)


class Squares(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def averaged(kind: Any, layout: dict[str, Any] | None, seed: int = 0) -> Any:
    """A module, and the trainer of one epoch more than `seed`."""
    torch.manual_seed(seed)
    model = Squares(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    if layout is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
        example = {"x": torch.zeros(4, 4, dtype=torch.float64)}
        model = merakc.auto_parallel(model, example, cluster=NOMINAL_CPU, **layout)
    return Averaged(model), kind(
        max_epochs=1 + seed, callbacks=[EMAWeightAveraging(decay=0.5)],
        limit_val_batches=0, num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip


def from_averages(kind: Any, folder: Path, *layouts: Any) -> tuple[list[float], list[float]]:
    """Losses of the epoch behind a checkpoint, and of its averages."""
    drawn = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data = DataLoader([{"x": x} for x in drawn], batch_size=None)
    module, trainer = averaged(kind, layouts[0])
    saving = LambdaCallback(on_train_epoch_end=lambda t, _: t.save_checkpoint(folder / "saved"))
    trainer.callbacks.append(saving)
    trainer.fit(module, data)
    module, trainer = averaged(kind, layouts[1], seed=1)
    trainer.fit(module, data, ckpt_path=folder / "saved")
    after = module.losses
    module, trainer = averaged(kind, layouts[1], seed=2)
    trainer.limit_val_batches = 1.0
    options = {} if layouts[0] else {"weights_only": False}
    trainer.validate(module, data, ckpt_path=folder / "saved", verbose=False, **options)
    return after, module.losses


def test_averaged_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    """They are in the model's place in Lightning's checkpoints."""
    wanted = from_averages(lightning.pytorch.Trainer, tmp_path / "plain", None, None)
    layouts = {"pp": 2}, {"tp": 2}
    for found in run_ranks(2, from_averages, Trainer, tmp_path / "ours", *layouts):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-10)


def with_weights(folder: Path) -> str:
    """What is told where a hook puts the weights of each rank into the checkpoint."""
    module, trainer = averaged(Trainer, {"pp": 2})
    module.trainer = trainer
    trainer.strategy.connect(module)
    with pytest.raises(CheckpointError) as told:
        trainer.strategy.save_checkpoint({"own": dict(module.model.state_dict())}, folder / "saved")
    return str(told.value)


def test_weights_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(2, with_weights, tmp_path):
        assert "is not the same tensor on ranks 0 and 1" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ddp"}, r"strategy=...\): auto_parallel has made"),
        ({"devices": 2}, r"devices=...\)"),
        ({"precision": "bf16-mixed"}, r"precision='bf16-mixed'\): auto_parallel\(..., precision"),
    ],
)
def test_what_would_be_wrong_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, on({}), 2, 0, 2)
    with pytest.raises(ConfigError, match=message):
        Trainer(max_steps=1, **QUIET, **options).fit(
            Module(merakc.auto_parallel(job.model(), job.example, **job.layout)),
            DataLoader(job.batches(0), batch_size=None),
        )


def test_other_modules_are_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, on({}), 2, 0, 2)
    module = Module(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Module holds 0 models of auto_parallel"):
        ParallelStrategy().connect(module)
    module = Module(merakc.auto_parallel(job.model(), job.example, **job.layout))
    module.head = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"head\.weight, head\.bias: make them a part"):
        ParallelStrategy().connect(module)
