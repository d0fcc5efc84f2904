"""DeepSpeed's ZeRO, as in its "getting started": `initialize`, `backward` and `step`."""

from __future__ import annotations

import deepspeed  # type: ignore[import-not-found]
import torch

from benchmarks.peers.training import Contestant, Tensors, Training, adamw


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank, for "zero-0" to "zero-3"."""
    model = training.model()
    stage = int(form.removeprefix("zero-"))
    config = {
        "train_micro_batch_size_per_gpu": training.samples,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "gradient_clipping": 0.0,  # or it clips at 1, as nobody else does
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config
    )

    def step(batch: Tensors) -> None:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

    def weights() -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    return Contestant(step, weights)
