"""accelerate's `Accelerator` on a model of `auto_parallel`, in place of accelerate's own.

The program stays as it is in one process: batches are the whole job's, every rank reads the same
ones, and the model takes from each what its dp rank trains on. So `gather_for_metrics` has nothing
to gather, schedules take one step for each of the optimizer's, and accumulation divides once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Never

import accelerate
import numpy as np
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from accelerate.utils import DistributedType, DynamoBackend

from merakc.errors import CheckpointError, ConfigError
from merakc.integrations.alone import put_weights, read_everything, stand_alone
from merakc.machines.start import device_of, start_distributed
from merakc.runtime.groups import from_rank_0, together
from merakc.train.checkpoints.loading import load
from merakc.train.checkpoints.saving import save
from merakc.train.model import ParallelModel
from merakc.train.outside.deferred import Deferred

# Other parallelism, by the argument of Accelerator or the variable of `accelerate launch`.
_OTHERS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "torch_tp_plugin",
    "megatron_lm_plugin", "parallelism_config",
)  # fmt: skip
_VARIABLES = tuple(f"ACCELERATE_USE_{x}" for x in ("DEEPSPEED", "FSDP", "MEGATRON_LM",
                                                   "PARALLELISM_CONFIG"))  # fmt: skip


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """What a program for one process does, on the ranks of one model of `auto_parallel`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = signature(accelerate.Accelerator).bind(*args, **kwargs).arguments
        found = [n for n in _OTHERS if given.get(n) is not None]
        found += [n for n in _VARIABLES if os.environ.get(n, "").lower() == "true"]
        if found:
            raise ConfigError(
                f"Accelerator: {found[0]} is given, and auto_parallel makes the model parallel; "
                "leave it out"
            )
        device = device_of("cpu" if given.get("cpu") else None)
        start_distributed(device)
        stand_alone(dist.get_rank() if dist.is_initialized() else 0, device)
        super().__init__(*args, **kwargs)
        read_everything(self)
        if self.distributed_type != DistributedType.NO:  # by whatever else it was told
            raise ConfigError(
                f"Accelerator: it is set to {self.distributed_type}, and auto_parallel makes the "
                "model parallel; leave that out"
            )
        if self.mixed_precision != "no":
            raise ConfigError(
                f"Accelerator(mixed_precision={self.mixed_precision!r}): "
                "auto_parallel(..., precision=...) says what is computed in"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ConfigError("Accelerator(dynamo_backend=...): auto_parallel(..., compile=True)")
        if self.use_stateful_dataloader:
            raise ConfigError(
                "Accelerator: use_stateful_dataloader=True is not supported; "
                "accelerator.skip_first_batches goes on inside an epoch"
            )

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model, which is parallel already, and is given whole batches from here on."""
        if not isinstance(model, ParallelModel):
            raise ConfigError(
                f"this Accelerator is given a {type(model).__name__}; give it the model that "
                "auto_parallel returned; one that is not trained needs no prepare"
            )
        if [m for m in self._models if m is not model]:
            raise ConfigError("this Accelerator has a model already; make one for each model")
        model.read_whole_batches()
        return super().prepare_model(model, *args, **kwargs)

    # ------------------------------------------------------------------ what ranks do together

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have come here."""
        together(lambda: True)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Lets rank 0 go first."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last time."""
        found = any(together(lambda: self.flag_tensor is not None))
        self.flag_tensor = None
        return found

    # ------------------------------------------------------------------ files

    def gather(self, tensor: Any) -> Any:
        """The values of outputs, fetched now: after another call of the model they could not be."""
        return pytree.tree_map_only(Deferred, lambda x: x.source.value(x.place), tensor)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole model's state on the CPU of rank 0; {} elsewhere. All ranks must call it."""
        return model.full_state_dict()  # type: ignore[no-any-return]

    def save_model(self, model: Any, save_directory: str | Path, *_: Any, **__: Any) -> None:
        """Writes what `from_pretrained` reads. All ranks must call it."""
        put_weights(Path(save_directory), model, main=self.is_main_process)

    def save_state(self, output_dir: str | Path | None = None, *_: Any, **__: Any) -> str:
        """Saves the run as `merakc.save` does, for any plan. All ranks must call it."""
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            above = Path(self.project_dir) / "checkpoints"
            output_dir = above / f"checkpoint_{self.save_iteration}"
            if from_rank_0(output_dir.exists):
                raise CheckpointError(f"{output_dir} is there already; set save_iteration")
        if output_dir is None:
            raise CheckpointError("save_state: no folder is given, and no automatic names")
        given, custom = self._run(), [x.state_dict() for x in self._custom_objects]
        extra = {"step": self.step, "custom": custom, "random": from_rank_0(_random_state)}
        save(output_dir, *given, extra, keep_last=project.total_limit)
        project.iteration += 1
        return str(output_dir)

    def load_state(self, input_dir: str | Path | None = None, *_: Any, **__: Any) -> None:
        """Goes on with a run that `save_state` has saved, on any plan. All ranks must call it."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = Path(self.project_dir) / "checkpoints"
        if input_dir is None:
            raise CheckpointError("load_state: no folder is given, and no automatic names")
        extra = load(input_dir, *self._run()).extra
        if not isinstance(extra, dict) or extra.keys() != {"step", "custom", "random"}:
            raise CheckpointError(
                f"{input_dir} was not written by accelerator.save_state of this Accelerator; "
                "merakc.load reads what merakc.save wrote"
            )
        if len(extra["custom"]) != len(self._custom_objects):
            raise CheckpointError(
                f"{input_dir} holds {len(extra['custom'])} objects that were registered for "
                f"checkpoints, and {len(self._custom_objects)} are now: register the same ones"
            )
        for own, state in zip(self._custom_objects, extra["custom"], strict=True):
            own.load_state_dict(state)
        self.step = extra["step"]
        python, numpy, torchs = extra["random"]
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)

    def _run(self) -> tuple[Any, list[Any], list[Any]]:
        """The model, its optimizers and their schedules."""
        if not self._models:
            raise CheckpointError("this Accelerator has no model: prepare it first")
        optimizers = [x.optimizer for x in self._optimizers]
        return self._models[0], optimizers, [x.scheduler for x in self._schedulers]

    def register_save_state_pre_hook(self, hook: Any) -> Never:
        """Refuses: such hooks take weights whole."""
        raise ConfigError(
            "hooks on save_state are given all weights, which no rank has: write what you need "
            "beside accelerator.save_state; accelerator.save_model writes weights"
        )

    register_load_state_pre_hook = register_save_state_pre_hook


def _random_state() -> tuple[Any, ...]:
    """Where the random numbers of Python, numpy and torch stand, which draw batches."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()
