"""What fits is loaded, and what does not is refused before anything is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import merakc
from benchmarks.ranks import run_ranks
from merakc.errors import CheckpointError, MerakError, MismatchError
from tests.battery.small_models import Words, build, warm_up
from tests.train.checkpoints.small_runs import saved, trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    warm_up()
    folder = tmp_path_factory.mktemp("runs") / "step-2"
    run_ranks(2, partial(saved, folder, 2, {"seen": 17}, dp=2, state_shards="zero-1"))
    return folder


def test_plain_pytorch_goes_on(folder: Path) -> None:
    model, optimizer = trained(0)
    loaded = merakc.load(folder, model, optimizer)
    assert (loaded.step, loaded.extra) == (2, {"seen": 17})
    wanted, state = trained(2)
    for (name, p), (_, q) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12, msg=name)
        for key, value in state.state[q].items():
            torch.testing.assert_close(optimizer.state[p][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (partial(Words, blocks=5), torch.optim.AdamW, r"the model has 'blocks.4.0.bias'"),
        (partial(Words, blocks=3), torch.optim.AdamW, r"the checkpoint has 'blocks.3.0.bias'"),
        (Words, torch.optim.SGD, r"is a torch.optim.sgd.SGD, and a torch.optim.adamw.AdamW was"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Any, optimizer: Any, message: str, folder: Path
) -> None:
    other = build(model)
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    with pytest.raises(CheckpointError, match=message):
        merakc.load(folder, other, optimizer(other.parameters(), lr=0.1))
    assert all(torch.equal(p, before[n]) for n, p in other.named_parameters())


def test_other_groups_are_refused(folder: Path) -> None:
    model = build(partial(Words))
    foreign = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(CheckpointError, match="that is not one of the model's"):
        merakc.load(folder, model, foreign)
    with pytest.raises(CheckpointError, match="2 optimizers are given, and 1 were saved"):
        merakc.load(folder, model, [foreign, foreign])


def test_the_newest_good_one_is_found(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for step in (8, 9, 10):
        merakc.save(tmp_path / f"step-{step}", model, optimizer, extra=step)
    assert merakc.latest(tmp_path) == tmp_path / "step-10"
    path = tmp_path / "step-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "notes").mkdir()
    with pytest.warns(UserWarning, match=r"passed over: .*model.safetensors has"):
        assert merakc.latest(tmp_path) == tmp_path / "step-9"
    with pytest.warns(UserWarning, match="passed over"):
        assert merakc.load(tmp_path, model, optimizer).extra == 9
    assert merakc.latest(tmp_path / "nothing") is None
    with pytest.raises(CheckpointError, match="no such folder; give one that"):
        merakc.load(tmp_path / "nothing", model)


class Loader:
    """Knows where it stands."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "state": random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        random.setstate(state["state"])


def with_loader(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Objects load their own state, of their rank."""
    rank = dist.get_rank()
    average = AveragedModel(model)
    for extra in ({"ema": [*map(torch.Tensor.detach, model.parameters())]}, {"average": average}):
        with pytest.raises(CheckpointError, match=r"extra.*another plan has other parts"):
            merakc.save(path, model, optimizer, extra=extra)
    random.seed(rank)
    tensor = torch.full((2,), float(rank))
    merakc.save(path, model, optimizer, extra={"loader": Loader(10 + rank), "tensor": tensor})
    wanted, loader = random.random(), Loader(0)
    random.seed(99)
    loaded = merakc.load(path, model, optimizer, extra={"loader": loader})
    assert (loader.at, random.random()) == (10 + rank, wanted)
    assert torch.equal(loaded.extra["tensor"], tensor)


class Failing(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank():
            raise ValueError("no such file")


def resume_elsewhere(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match="rank 1 sees no folder"):
        merakc.load(folder.parent if rank == 0 else folder / "lost", model, optimizer)
    with pytest.raises(MismatchError, match=r"rank 1 has .* for 0 optimizers and 0 schedulers"):
        merakc.load(folder, model, None if rank else optimizer)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises((MerakError, ValueError)) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def unlike(folder: Path, own: Path) -> dict[str, str]:
    """What a rank is told where the other saves or loads something else."""
    model, optimizer = trained(1, tp=2)
    with_loader(own / "loader", model, optimizer)
    resume_elsewhere(folder, model, optimizer)
    other = own / "step-2" if dist.get_rank() else folder
    told = {"folder": refusal(lambda: merakc.load(other, model, optimizer))}
    merakc.save(own / "failing", model, optimizer, extra=(loader := Failing(1)))
    told["failing"] = refusal(lambda: merakc.load(own / "failing", model, optimizer, extra=loader))
    optimizer.param_groups[0]["lr"] = 0.1 * dist.get_rank()
    told["rate"] = refusal(lambda: merakc.save(own / "c", model, optimizer))
    return told


def test_ranks_save_and_load_the_same_and_their_own_objects(folder: Path, tmp_path: Path) -> None:
    """What fails on one is told to all, who would go on from another step than that one."""
    saved(tmp_path / "step-2", 1)
    first, second = run_ranks(2, partial(unlike, folder, tmp_path))
    for told in (first, second):
        assert "the ranks differ in checkpoint" in told["folder"]
        assert "rank 1's optimizer 0 is not as rank 0's: lr is 0.1 for" in told["rate"]
    wanted = "MismatchError: rank 1 could not take part: ValueError: no such file"
    assert (first["failing"], second["failing"]) == (wanted, "ValueError: no such file")


class Copying(nn.Linear):
    """One whose state dict holds copies, in another order of its elements."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + "weight"].t())


def test_state_dicts_of_copies_are_loaded(tmp_path: Path) -> None:
    saved_one, other = Copying(3, 3, bias=False), Copying(3, 3, bias=False)
    merakc.save(tmp_path / "c", saved_one)
    merakc.load(tmp_path / "c", other)
    assert torch.equal(saved_one.weight, other.weight)


def counting(dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    model = nn.Module()
    model.register_buffer("count", torch.ones(2, dtype=dtype, device=device) * 300)
    return model


def test_values_are_cast_between_floating_dtypes_alone(tmp_path: Path) -> None:
    merakc.save(tmp_path / "int", counting(torch.int64))
    merakc.save(tmp_path / "float", counting(torch.float32))
    merakc.load(tmp_path / "float", counting(torch.bfloat16))
    for name, dtype in (("int", torch.uint8), ("int", torch.float32), ("float", torch.int64)):
        with pytest.raises(CheckpointError, match="only between floating dtypes"):
            merakc.load(tmp_path / name, counting(dtype))
    with pytest.raises(CheckpointError, match="'count' of the model is on the meta device"):
        merakc.load(tmp_path / "int", counting(torch.int64, "meta"))


def test_schedulers_may_be_left_out(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.param_groups[0]["lr"] = 0.005
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    merakc.save(tmp_path / "c", model, optimizer, scheduler)
    other, fresh = trained(0)
    merakc.load(tmp_path / "c", other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.005
