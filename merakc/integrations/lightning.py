"""Lightning's `Trainer` on a model of `auto_parallel`, in place of Lightning's own.

The program stays as it is in one process: loaders read the whole job's batches, the same on every
rank, and the model, which a `LightningModule` holds, takes from each what its dp rank trains on. So
losses, metrics, clipping, accumulation and schedules are those of one process, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from merakc.errors import CheckpointError, ConfigError
from merakc.machines.start import device_of, start_distributed
from merakc.runtime.groups import from_rank_0, together
from merakc.train.checkpoints.loading import load
from merakc.train.checkpoints.saving import save
from merakc.train.model import ParallelModel


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
        names = {n for n, m in self.lightning_module.named_modules() if m is self.parallel}
        inside = tuple(f"{name}." for name in names)
        return {
            n: t.detach() for n, t in state.items() if id(t) not in own and not n.startswith(inside)
        }

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is saved with the weights."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, *_: Any, **__: Any) -> None:
        """Saves the run as `merakc.save` does, for any plan. All ranks must call it."""
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        save(filepath, self.parallel, optimizers, extra=from_rank_0(lambda: checkpoint))

    def load_checkpoint(self, checkpoint_path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Loads weights, and the optimizer's state where the model trains. All must call it."""
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        found = load(checkpoint_path, self.parallel, self.optimizers if fits else None).extra
        if not isinstance(found, dict) or "pytorch-lightning_version" not in found:
            raise CheckpointError(
                f"{checkpoint_path} was not written by Lightning's Trainer on a parallel model; "
                "merakc.load reads what merakc.save wrote"
            )
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what was kept beside the parallel model, which `load_checkpoint` has loaded."""
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has loaded it."""


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
