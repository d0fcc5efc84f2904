"""What waits on the host: not a bit changes, and both memories are what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import merakc
from benchmarks.memory import alive
from benchmarks.models import MODELS
from benchmarks.ranks import run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU, Cluster
from merakc.runtime.live_bytes import LiveBytes
from merakc.train.model import ParallelModel
from tests.battery.small_models import LENGTH, WIDTH, Words, parallel, part, warm_up, words

Tensors = dict[str, torch.Tensor]
ALL = {"offload": "activations"}


class Found(NamedTuple):
    """Loss and gradients of a step; predicted and measured bytes of the next, both with no state of
    an optimizer, on the device and on the host.
    """

    loss: float
    gradients: Tensors
    predicted: int
    measured: int
    host_predicted: int
    host_measured: int
    shares: tuple[float, ...]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def found(model: ParallelModel, batch: Any) -> Found:
    loss = model(**batch)["loss"]
    loss.backward()
    gradients = model.full_gradients()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()
    optimizer.zero_grad()
    tracker = LiveBytes(alive(model, optimizer))
    with tracker:
        model(**batch)["loss"].backward()
    file = model.plan_file
    _, rank, _ = file.decisions.mesh.coordinates(dist.get_rank() if dist.is_initialized() else 0)
    assert file.prediction is not None
    on_host = file.prediction.host_bytes
    return Found(
        loss.item(), gradients, file.prediction.peak_bytes[rank], tracker.peak_bytes,
        on_host[rank] if on_host else 0, tracker.host_peak_bytes, file.decisions.host_activations,
    )  # fmt: skip


def train(name: str, cluster: Cluster = NOMINAL_CPU, **options: Any) -> Found:
    torch.manual_seed(0)
    how: dict[str, Any] = {"dropout": 0.1} if name == "gpt2" else {}
    model, batch = MODELS[name].model(**how), MODELS[name].batch(16)
    options = {"micro_batches": 1, "recompute": "none", **options}
    return found(merakc.auto_parallel(model.train(), batch, cluster=cluster, **options), batch)


def assert_same_bits(one: Found, other: Found) -> None:
    assert one.loss == other.loss
    assert one.gradients.keys() == other.gradients.keys()
    for key, value in one.gradients.items():
        assert torch.equal(value, other.gradients[key]), key


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"offload": "activations, 400 KiB", "recompute": "none"}),
        ("llama", {"precision": "bf16-mixed", "recompute": "selective"}),
        ("llama", {"recompute": "0.6"}),
        ("gpt2", {"recompute": "full", "micro_batches": 2}),
    ],
)
def test_not_a_bit_changes_and_both_memories_are_as_predicted(
    name: str, options: dict[str, Any]
) -> None:
    kept, moved = train(name, **options | {"offload": "none"}), train(name, **ALL | options)
    assert_same_bits(kept, moved)
    assert moved.host_measured == moved.host_predicted > 0
    # What mixed precision holds beside the model is not among the measured bytes.
    assert moved.measured - moved.predicted == pytest.approx(
        kept.measured - kept.predicted, abs=0.03 * kept.measured
    )
    assert kept.host_measured == 0
    assert moved.measured < kept.measured


LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "micro_batches": 4, "schedule": "zb-h1", "recompute": "none"},
    {"pp": 2, "micro_batches": 4, "schedule": "1f1b", "recompute": "full", "cluster": NOMINAL_GPU},
    {"tp": 2, "overlap": 2, "recompute": "none", "sequence_parallel": True},
    {"dp": 2, "state_shards": "zero-1", "recompute": "none", "precision": "bf16-mixed"},
]


SENT_BYTES = 4 * (64 // 4) * LENGTH * WIDTH * 8
"""The messages of a batch, each of a micro-batch or a part of one: what a rank holds where a busy
neighbor has taken none yet.
"""


def on_ranks() -> list[tuple[Found, Found]]:
    """By layout, what is found with all kept, and with all of it on the host."""

    def trained(offload: str, **options: Any) -> Found:
        batch = words(0, batch_size=64)
        model = parallel(lambda: Words(blocks=2, dropout=0.2), batch, offload=offload, **options)
        return found(model, part(batch, model))

    return [(trained("none", **own), trained("activations", **own)) for own in LAYOUTS]


def test_not_a_bit_changes_on_two_ranks() -> None:
    for rank in run_ranks(2, on_ranks):
        for layout, (kept, moved) in zip(LAYOUTS, rank, strict=True):
            assert_same_bits(kept, moved)
            assert moved.host_measured == moved.host_predicted > 0, layout
            off_bytes = kept.measured - kept.predicted
            sent_bytes = SENT_BYTES if layout.get("pp") or layout.get("overlap") else 0
            assert moved.measured <= kept.measured + sent_bytes, layout
            assert moved.measured - moved.predicted == pytest.approx(
                off_bytes, abs=0.03 * kept.measured + sent_bytes
            ), layout


def test_only_what_the_device_has_no_room_for_moves() -> None:
    kept = train("gpt2")
    room = replace(NOMINAL_CPU, memory_bytes=int(0.9 * kept.predicted))
    moved = train("gpt2", room, offload="auto", recompute="none")
    assert_same_bits(kept, moved)
    assert 0 < moved.shares[0] < 0.6
    assert 0.85 * room.memory_bytes < moved.measured <= room.memory_bytes
    assert train("gpt2", offload="auto").shares == ()


def test_what_cannot_be_is_refused() -> None:
    bare = replace(NOMINAL_CPU, host=None)
    with pytest.raises(ConfigError, match=r"does not say what memory .* \[nodes.host\]"):
        train("gpt2", bare, **ALL)
    with pytest.raises(ConfigError, match=r"what the schedule makes again .* ask for recompute"):
        train("gpt2", recompute="stage", **ALL)
    with pytest.raises(ConfigError, match=r"a device may use 8.00 GiB"):
        train("gpt2", offload="activations, 9 GiB")
