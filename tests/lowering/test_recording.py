"""A micro-batch recorded as a part of its batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import merakc
from merakc.errors import ConfigError, MerakWarning, RecordError
from merakc.ir.batches import BatchLayout
from merakc.ir.precision import NAMED
from merakc.kernels.draws import KEY_POSITION
from merakc.lowering.recording import record_part
from merakc.machines.cluster import NOMINAL_CPU
from merakc.passes.batches.recorded import BatchRecording
from tests.recorded import recorded


class Averaged(nn.Module):
    """A mean that is written as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.dropped = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """One over the samples is a number by the time that it is recorded."""
        return {"loss": self.layer(self.dropped(x)).square().sum() * (1 / len(x))}


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_the_number_of_samples_is_known_in_a_loss(micro_batches: int) -> None:
    torch.manual_seed(0)
    model, x = Averaged().eval(), torch.linspace(-1, 1, 24).view(8, 3).double()
    wanted = model(x)["loss"].item()
    parallel = merakc.auto_parallel(
        model, {"x": x}, micro_batches=micro_batches, cluster=NOMINAL_CPU
    )
    assert parallel(x=x)["loss"].item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("samples", [1, 3])
def test_draws_are_keyed_by_the_samples(samples: int) -> None:
    x = torch.zeros(2 * samples, 3).double()
    ops = [n.op for n in recorded(Averaged(), {"x": x}, 2).graph.nodes]
    (drawn,) = (op for op in ops if op.startswith("merakc."))
    assert drawn in KEY_POSITION


class Complete(nn.Module):
    """A loss that counts more where all labels are there, and all features finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        factor = (1 + (mask.mean() == 1)) * (1 + (y < 1e9).double().mean().floor())
        return y.square().mean() * factor


def test_a_mean_of_ones_is_one() -> None:
    """Ten tenths add up to less."""
    torch.manual_seed(0)
    model, given = Complete(), {"x": torch.randn(10, 3).double(), "mask": torch.ones(10).double()}
    wanted = model(**given).item()
    parallel = merakc.auto_parallel(model, given, micro_batches=10, cluster=NOMINAL_CPU)
    assert parallel(**given).item() == pytest.approx(wanted, rel=1e-12)


class ReadInPlaces(nn.Module):
    """Asks for padding, of as many rows as there are; one row takes a path of its own."""

    def __init__(self, *, otherwise: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.otherwise = otherwise

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = mask.reshape(len(x), 3)
        y = self.layer(x)
        if (rows if len(x) > 1 or not self.otherwise else mask.flip(0)).any():
            y = y * 2
        if len(x) > 1:
            y = y.square()
            if self.otherwise and (mask == 7).any():
                y = y + 1
        else:
            y = y * y
        return {"loss": y.mean()}


def _read_in_places(*, otherwise: bool) -> BatchRecording:
    batch = {"x": torch.ones(2, 3).double(), "mask": torch.ones(2, 3, dtype=torch.int64)}
    layout, model = BatchLayout((2, 2), 2), ReadInPlaces(otherwise=otherwise)
    return record_part(model, (), batch, layout, torch.device("cpu"))


def test_one_sample_is_asked_for_what_one_says() -> None:
    made = _read_in_places(otherwise=False)
    assert made.reads is not None
    assert any(n.op == "aten.pow.Tensor_Scalar" for n in made.graph.nodes)  # the batch's path
    assert made.reads.of({"mask": torch.zeros(1, 3, dtype=torch.int64)}) == (False,)


def test_numbers_that_one_sample_is_not_asked_for_are_refused() -> None:
    with pytest.raises(RecordError, match=r"test_recording.py:\d+: .* does not read alike of one"):
        _read_in_places(otherwise=True)


def test_a_frozen_model_without_a_loss_is_refused_with_what_to_do() -> None:
    """And what is said to be done works."""
    x, model = torch.ones(4, 3).double(), nn.Linear(3, 2).double()
    with pytest.raises(ConfigError, match="is frozen after auto_parallel"):
        merakc.auto_parallel(nn.Linear(3, 2).requires_grad_(False), x.float(), dp=1)
    wanted = model(x).detach()
    with pytest.warns(MerakWarning, match="for the mean of its outputs"):
        teacher = merakc.auto_parallel(model, x, dp=1, micro_batches=2)
    teacher.requires_grad_(False).eval()
    with torch.no_grad():
        torch.testing.assert_close(teacher(x), wanted)


def test_a_gpu_without_products_of_float8_is_refused_before_the_forward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    model = Averaged()
    model.forward = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"A GPU, of .* 8.0, has no products"):
        record_part(
            model, (), {"x": torch.ones(2, 3)}, BatchLayout((2,), 1), torch.device("cuda"),
            NAMED["fp8-mixed"],
        )  # fmt: skip
