"""Lightning's `Trainer` on a model of `auto_parallel`, in place of Lightning's own.

The program stays as it is in one process: loaders read the whole job's batches, the same on every
rank, and the model, which a `LightningModule` holds, takes from each what its dp rank trains on. So
losses, metrics, clipping, accumulation and schedules are those of one process, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from merakc.errors import CheckpointError, ConfigError
from merakc.machines.start import device_of, start_distributed
from merakc.runtime.groups import from_rank_0, together
from merakc.train.checkpoints.exporting import export
from merakc.train.checkpoints.loading import load
from merakc.train.checkpoints.saving import save
from merakc.train.model import ParallelModel

_AVERAGE = "averaged"  # the folder in a checkpoint that holds averaged weights


class ParallelStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Runs a `LightningModule` that holds a model of `auto_parallel`, as in one process.

    Checkpoints are those of `merakc.save`, and are resumed under any plan. Rank 0 logs.
    """

    strategy_name = "merakc"
    parallel: ParallelModel

    def connect(self, model: Any) -> None:
        """Finds the parallel model in a `LightningModule`."""
        super().connect(model)
        found = [m for m in model.modules() if isinstance(m, ParallelModel)]
        if len(found) != 1:
            raise ConfigError(
                f"{type(model).__name__} holds {len(found)} models of auto_parallel; it must hold "
                "one: self.model = merakc.auto_parallel(model, batch)"
            )
        self.parallel = found[0]
        own = {id(p) for p in self.parallel.parameters()}
        others = [n for n, p in model.named_parameters() if id(p) not in own]
        if others:
            raise ConfigError(
                f"{type(model).__name__} has parameters beside its parallel model, "
                f"{', '.join(others)}: make them a part of the model before auto_parallel"
            )
        self.parallel.read_whole_batches()
        self._root_device = self.parallel._own("_steps").device
        self.global_rank = rank_zero_only.rank = self.parallel.rank

    def setup(self, trainer: Any) -> None:
        """Refuses what would compute in another precision than the plan."""
        if type(self.precision_plugin) is not Precision:
            raise ConfigError(
                f"Trainer(precision={self.precision_plugin.precision!r}): "
                "auto_parallel(..., precision=...) says what is computed in"
            )
        super().setup(trainer)

    def teardown(self) -> None:
        """Leaves the model where it is."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------------ what ranks do together

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes and logs."""
        return bool(self.global_rank == 0)

    def barrier(self, *_: Any, **__: Any) -> None:
        """Waits until all ranks have come here."""
        together(lambda: True)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What a rank has, on all of them."""
        return together(lambda: obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so."""
        found = together(lambda: bool(decision))
        return min(found) if all else max(found)

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights come with the optimizer's state."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What is kept beside the parallel model: metrics, buffers."""
        own = {id(t) for t in (*self.parallel.parameters(), *self.parallel.buffers())}
        state = self.lightning_module.state_dict(keep_vars=True)
        return self._beside({n: t.detach() for n, t in state.items() if id(t) not in own})

    def _beside(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What of a state of the whole module does not belong to the parallel model."""
        names = {n for n, m in self.lightning_module.named_modules() if m is self.parallel}
        inside = tuple(f"{name}." for name in names)
        return {n: value for n, value in state.items() if not n.startswith(inside)}

    @property
    def _averages(self) -> list[Any]:
        """The averages of the module that Lightning's callbacks keep."""
        callbacks = self.lightning_module.trainer.callbacks
        kept = [c._average_model for c in callbacks if isinstance(c, WeightAveraging)]
        return [average for average in kept if average is not None]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is saved with the weights."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, *_: Any, **__: Any) -> None:
        """Saves the run as `merakc.save` does, for any plan. All ranks must call it.

        The weights that `WeightAveraging` puts in the place of the model's lie in a folder in it.
        """
        averages = self._averages
        if len(averages) > 1:
            raise CheckpointError(f"{len(averages)} callbacks average weights: keep one of them")
        if averages:
            checkpoint = {**checkpoint, "state_dict": self._beside(checkpoint["state_dict"])}
        _check_alike(checkpoint)
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        save(filepath, self.parallel, optimizers, extra=from_rank_0(lambda: checkpoint))
        for average in averages:
            export(Path(filepath) / _AVERAGE, _parallel_in(average))

    def load_checkpoint(self, checkpoint_path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Loads weights, and the optimizer's state where the model trains. All must call it."""
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        found = load(checkpoint_path, self.parallel, self.optimizers if fits else None).extra
        if not isinstance(found, dict) or "pytorch-lightning_version" not in found:
            raise CheckpointError(
                f"{checkpoint_path} was not written by Lightning's Trainer on a parallel model; "
                "merakc.load reads what merakc.save wrote"
            )
        if "averaging_state" not in found:
            return found
        averages = self._averages if fits else []
        for model in [_parallel_in(x) for x in averages] or [self.parallel]:
            load(Path(checkpoint_path) / _AVERAGE, model)
        for average in averages:  # the callback loads them, over what is there already
            found["state_dict"] = average.module.state_dict() | found["state_dict"]
            own = self.lightning_module.state_dict()
            found["current_model_state"] = own | found["current_model_state"]
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what was kept beside the parallel model, which `load_checkpoint` has loaded."""
        beside = self._beside(checkpoint["state_dict"])
        self.lightning_module.load_state_dict(beside, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has loaded it."""


def _parallel_in(module: Any) -> ParallelModel:
    return next(m for m in module.modules() if isinstance(m, ParallelModel))


def _check_alike(checkpoint: Any) -> None:
    """Raises `CheckpointError` on every rank where they give other tensors: rank 0's are kept."""
    found = [x for x in pytree.tree_flatten_with_path(checkpoint)[0] if torch.is_tensor(x[1])]
    own = {f"checkpoint{pytree.keystr(path)}": tuple(value.shape) for path, value in found}
    for rank, other in enumerate(every := together(lambda: own)):
        if unlike := sorted(dict(other.items() ^ every[0].items())):
            raise CheckpointError(
                f"{unlike[0]} is not the same tensor on ranks 0 and {rank}, which hold other parts "
                "of the model: put no weights into the checkpoint in on_save_checkpoint; save what "
                "you average in a copy of the model, by merakc.save(folder, copy)"
            )


class Trainer(lightning.pytorch.Trainer):  # type: ignore[misc]
    """Lightning's, with a `ParallelStrategy`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, lone in (("strategy", "auto"), ("devices", "auto"), ("num_nodes", 1)):
            if kwargs.pop(name, lone) not in (lone, 1):
                raise ConfigError(
                    f"Trainer({name}=...): auto_parallel has made the model parallel, on the ranks "
                    "that torchrun has started; leave it out"
                )
        start_distributed(device_of("cpu" if kwargs.get("accelerator") == "cpu" else None))
        rank_zero_only.rank = dist.get_rank() if dist.is_initialized() else 0
        plugins = [LightningEnvironment(), *(kwargs.pop("plugins", None) or ())]
        super().__init__(*args, strategy=ParallelStrategy(), devices=1, plugins=plugins, **kwargs)
