"""Accelerate, as in its quick tour: `prepare` and `backward`."""

from __future__ import annotations

from accelerate import Accelerator  # type: ignore[import-not-found]

from benchmarks.peers.training import Contestant, Tensors, Training, adamw


def build(training: Training, form: str, rank: int) -> Contestant:
    """The model on this rank; `form` is not used."""
    accelerator = Accelerator(cpu=True)
    model = training.model()
    optimizer = adamw(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Tensors) -> None:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()

    def weights() -> Tensors:
        return dict(accelerator.unwrap_model(model).named_parameters())

    return Contestant(step, weights)
