"""State dicts say which parts they hold, and take whole tensors or the same parts."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import merakc
from benchmarks.models import MODELS
from benchmarks.ranks import RankError, run_ranks
from merakc.errors import ConfigError
from merakc.machines.cluster import NOMINAL_CPU
from merakc.runtime.part import TensorPart
from tests.battery.small_models import Words, build, parallel, part, warm_up, words


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


LAYOUTS = [{"tp": 2}, {"pp": 2}, {"dp": 2, "state_shards": "zero-3"}, {"dp": 2, "tp": 2}]


def whole_and_back(layout: dict[str, Any]) -> None:
    model = parallel(partial(Words), words(0), **layout)
    wanted = build(partial(Words), seed=7).state_dict()
    found = model.load_state_dict(wanted)
    assert not found.missing_keys
    assert not found.unexpected_keys
    full = model.full_state_dict()
    for name, value in full.items():
        assert torch.equal(value, wanted[name]), name
    own = model.state_dict()
    assert all(tuple(value.shape) == tuple(wanted[n].shape) for n, value in own.items())
    with pytest.raises(
        ConfigError, match=r"'norm.weight' is given as \(3,\), and the whole is \(8,\)"
    ):
        model.load_state_dict({**wanted, "norm.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(wanted, assign=True)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, wanted[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):  # state that is loaded before a step says what it is, too
        model(**part(words(0), model))["loss"].backward()
        optimizer.step()
        other = torch.optim.AdamW(model.parameters(), lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        optimizer = other
    state = optimizer.state_dict()["state"]
    parts = [v for s in state.values() for v in s.values() if isinstance(v, TensorPart)]
    assert bool(parts) == any(isinstance(v, TensorPart) for v in own.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_are_taken_in_parts(layout: dict[str, Any]) -> None:
    size = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    run_ranks(size, partial(whole_and_back, layout))


def rank_0_saves_for_all(path: Path) -> None:
    model = parallel(partial(Words), words(0), tp=2)
    if model.rank == 0:
        torch.save(model.state_dict(), path)
    torch.distributed.barrier()
    model.load_state_dict(torch.load(path))


def test_rank_0s_part_is_not_loaded_by_others(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="saved by another rank or under another plan"):
        run_ranks(2, partial(rank_0_saves_for_all, tmp_path / "rank0.pt"))


def own_files() -> None:
    model = parallel(partial(Words), words(0), tp=2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_each_rank_may_keep_a_file_of_its_own() -> None:
    run_ranks(2, own_files)


def test_state_dicts_need_no_gradient() -> None:
    model = parallel(partial(Words), words(0))
    assert not any(v.requires_grad for v in model.state_dict().values())
    assert any(v.requires_grad for v in model.state_dict(keep_vars=True).values())


def after_a_step(folder: Path) -> None:
    """A net whose running statistics are split over tp, and written since dp ranks shared them."""
    case = MODELS["resnet"]
    model = merakc.auto_parallel(
        case.model(), case.batch(4), dp=2, tp=2, micro_batches=2, cluster=NOMINAL_CPU
    )
    model(**case.batch(4))["loss"].backward()
    parts = [v for v in model.state_dict().values() if isinstance(v, TensorPart)]
    assert any(v.place.name.endswith("running_mean") for v in parts)
    assert not any(isinstance(v.local, TensorPart) for v in parts)
    merakc.save(folder, model)
    merakc.load(folder, model)


def test_buffers_that_a_step_has_written_are_loaded(tmp_path: Path) -> None:
    run_ranks(4, after_a_step, tmp_path / "saved")
