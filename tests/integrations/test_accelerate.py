"""accelerate: what ranks do together, what is saved, and what is refused.

That a run is that of one process, and goes on elsewhere, `benchmarks/loops` compares.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric
from transformers import LlamaForCausalLM

import merakc
from benchmarks.loops.job import Job, on
from merakc.equality.ranks import run_ranks
from merakc.errors import CheckpointError, ConfigError
from merakc.integrations.accelerate import Accelerator
from tests.as_users import printed

# Its own: that numbers on a CPU are pinned for no GPU.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)


class Counter:
    """What a program registers for checkpoints."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def together(folder: Path) -> tuple[Any, ...]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    job = Job(folder, on({"tp": 2}), 2, 0, 2)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator, counter = Accelerator(cpu=True, project_config=project), Counter()
    model = merakc.auto_parallel(job.model(), job.example, **job.layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, stream = accelerator.prepare(model, optimizer, DataLoader(Numbers()))
    assert [*stream] == [0, 1, 2]  # which rank 0 would read alone
    accelerator.register_for_checkpointing(counter)
    accelerator.save_model(model, folder / "weights")
    before = accelerator.get_state_dict(accelerator.unwrap_model(model))
    torch.manual_seed(7 + model.rank)
    with pytest.raises(CheckpointError, match="none"):
        accelerator.load_state(folder / "none")
    for counter.seen in (1, 2):
        accelerator.save_state()
    drawn, counter.seen = torch.rand(()), 3
    outputs, seen = model(**job.example), SumMetric()
    accelerator.backward(outputs.loss)
    labels = accelerator.gather_for_metrics(job.example["labels"])
    seen.update(torch.tensor(float(len(labels))))
    assert seen.compute() == len(job.example["labels"])
    assert torch.equal(accelerator.reduce(outputs.loss), outputs.loss)
    optimizer.step()
    accelerator.load_state()
    again = torch.rand(())
    if accelerator.process_index:
        accelerator.set_trigger()
    after = accelerator.get_state_dict(model)
    same = all(torch.equal(after[n], before[n]) for n in before) and len(after) == len(before)
    triggers = accelerator.check_trigger(), accelerator.check_trigger()
    return counter.seen, again.item(), drawn.item(), same, triggers, len(before) > 0


def test_ranks_save_load_and_stop_together(tmp_path: Path) -> None:
    first, second = run_ranks(2, together, tmp_path)
    assert (first[0], first[3], first[4]) == (2, True, (True, False)) == (second[0], *second[3:5])
    assert first[1] == first[2] == second[1]  # the random numbers of rank 0 count
    assert (first[5], second[5]) == (True, False)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    job = Job(tmp_path, {}, 2, 0, 2)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float64)
    for name, value in job.model().state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixed_precision": "bf16"}, r"mixed_precision='bf16'\): auto_parallel\(..., precision"),
        ({"dynamo_backend": "inductor"}, "compile=True"),
        ({"fsdp_plugin": object()}, "fsdp_plugin is given, and auto_parallel makes"),
    ],
)
def test_what_would_be_wrong_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **options)


def test_other_models_are_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="given a Linear; give it the model that auto_parallel"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="no model: prepare it first"):
        accelerator.save_state(tmp_path)


def theirs(folder: Path) -> str:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    job = Job(folder, on({"dp": 2}), 2, 0, 2)
    model = merakc.auto_parallel(job.model(), job.example, **job.layout)
    with pytest.raises(ConfigError) as refused:
        accelerate.Accelerator(cpu=True).prepare(model)
    return str(refused.value)


def test_accelerates_own_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(2, theirs, tmp_path):
        assert "merakc.integrations" in told


def test_the_pages_script_runs_on_two_ranks(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "accelerate.md").read_text()
    text = printed(tmp_path, re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], 2)
    losses = [float(x) for x in re.findall(r"^loss ([\d.]+)$", text, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert {p.name for p in tmp_path.iterdir()} == {"train.py", "state", "weights"}


def test_parallelism_that_accelerate_was_set_to_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", "FSDP", raising=False)
    with pytest.raises(ConfigError, match="it is set to FSDP"):
        Accelerator(cpu=True)
