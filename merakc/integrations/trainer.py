"""transformers' `Trainer` on a model of `auto_parallel`, in place of transformers' own.

The program stays as it is in one process: `per_device_train_batch_size` is the whole job's, every
rank reads the same batches, and the model takes from each what its dp rank trains on. So losses,
counts of labels, schedules, metrics and epochs are those of one process, whatever the plan. What
would put other parallelism, precision or losses around the model is refused. Other trainers become
such by `parallel(TheirTrainer)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Never

import torch
import transformers

from merakc.errors import ConfigError
from merakc.integrations.adapters import save_adapters
from merakc.integrations.alone import put_into, put_weights, read_everything, stand_alone
from merakc.train.checkpoints.exporting import export
from merakc.train.checkpoints.loading import load
from merakc.train.checkpoints.saving import save
from merakc.train.model import ParallelModel

_PRECISION = "auto_parallel(..., precision=...) says what is computed in"
_PARALLEL = "auto_parallel has made the model parallel; leave it out"
# What cannot be right around a parallel model, by the arguments of `TrainingArguments`.
_REFUSED = {
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "deepspeed": _PARALLEL,
    "fsdp": _PARALLEL,
    "parallelism_config": _PARALLEL,
    "torch_compile": "auto_parallel(..., compile=True) compiles",
    "label_smoothing_factor": "the loss is part of the model: compute it in the model's forward",
    "gradient_checkpointing": "enable it before auto_parallel, or give it recompute='full'",
    "activation_checkpointing": "enable it before auto_parallel, or give it recompute='full'",
    "auto_find_batch_size": "the micro-batches of the plan decide what memory a batch takes",
    "use_liger_kernel": "it changes the model, which is compiled: change it before auto_parallel",
    "activation_offloading": "auto_parallel(..., recompute='full') keeps fewer activations",
    "sync_ref_model": "it mixes parameters one by one, of which this rank may hold parts",
    "neftune_noise_alpha": "the noise is part of the forward: leave this out, and call transformers"
    ".integrations.neftune.activate_neftune(model, neftune_noise_alpha) before auto_parallel",
    "precompute_ref_log_probs": "leave it out: the reference model computes them in each step",
}


class _Parallel:
    """What a trainer does otherwise for a parallel model."""

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    state: Any
    model_init: Any
    _made: Any = None  # by `model_init`, for transformers to take
    push_to_hub: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.model_init = kwargs.get("model_init")
        super().__init__(*args, **kwargs)
        if getattr(self, "compute_loss_func", None) is not None:
            raise ConfigError(
                "compute_loss_func is given to the Trainer of a parallel model, whose loss is part "
                "of its steps: compute it in the model's forward"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Makes accelerate's object, for a process by itself; refuses what cannot be right."""
        if self.model is None and self.model_init is not None:
            self.model = self._made = self.call_model_init()  # which transformers does after this
        _check_parallel(self.model)
        for name, remedy in _REFUSED.items():
            if value := getattr(self.args, name, None):
                raise ConfigError(f"TrainingArguments({name}={value!r}): {remedy}")
        _ = self.args.device  # which makes accelerate's state, where nobody has
        device = self.model._own("_steps").device
        stand_alone(self.model.rank, device)
        self.args.__dict__["_setup_devices"] = device
        self.args._n_gpu = min(1, self.args.n_gpu)
        self.model.read_whole_batches()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        read_everything(self.accelerator)

    def call_model_init(self, trial: Any = None) -> Any:
        """The model of `model_init`, which calls `auto_parallel`; every rank makes it."""
        if (model := self._made) is not None:
            self._made = None
            return model
        model = super().call_model_init(trial)  # type: ignore[misc]
        _check_parallel(model)
        model.read_whole_batches()
        return model

    def hyperparameter_search(self, *_: Any, **__: Any) -> Never:
        """Refuses: each rank would draw trials of its own."""
        raise ConfigError(
            "hyperparameter_search draws its trials on each rank by itself, and ranks must train "
            "alike: write a loop over the arguments of your trials, with a Trainer for each"
        )

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """One batch of an evaluation, with logits where they are asked for."""
        called = model if prediction_loss_only else _Predicting(model)
        step = super().prediction_step  # type: ignore[misc]
        return step(called, inputs, prediction_loss_only, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what `from_pretrained` reads, of adapters those alone; every rank must call it."""
        folder = Path(output_dir or self.args.output_dir)
        if not _internal_call or self.args.save_only_model:
            if hasattr(self.model, "peft_config"):
                save_adapters(folder, self.model)
            elif _internal_call:  # a checkpoint, which `load` reads
                self._written(folder, lambda aside: export(aside, self.model))
            else:
                put_weights(folder, self.model, main=self.args.should_save)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _written(self, folder: Path, write: Callable[[Path], Any]) -> None:
        put_into(folder, write, main=self.args.should_save)

    @property
    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes weights and optimizer as a checkpoint for any plan."""
        given = self.model, self._own_optimizer, self.lr_scheduler
        self._written(Path(output_dir), lambda aside: save(aside, *given))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # those of all ranks are the same, or batches would not be
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(checkpoint, self.model, self._own_optimizer, self.lr_scheduler)

    def _load_best_model(self) -> None:
        load(self.state.best_model_checkpoint, self.model)


class _Predicting:
    """A model whose calls give all that its own forward returns; else it is as the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.predict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _check_parallel(model: Any) -> None:
    if not isinstance(model, ParallelModel):
        raise ConfigError(
            f"this Trainer is given a {type(model).__name__}; give it the model that "
            "auto_parallel returned, as model= or from model_init=, or use transformers' own"
        )


@cache
def parallel(kind: type[Any]) -> type[Any]:
    """A class of trainers like `kind`, transformers' or one that is made from it, for models of
    `auto_parallel`.
    """
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Parallel, kind), names)


Trainer = parallel(transformers.Trainer)
