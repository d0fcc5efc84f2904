"""transformers' Trainer: a run on ranks is that of one process, also when it goes on elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.integrations.neftune import activate_neftune

import merakc
from merakc.equality.ranks import run_ranks
from merakc.errors import ConfigError, MismatchError
from merakc.integrations.trainer import Trainer
from merakc.integrations.trainer import parallel as trainer_of
from merakc.machines.cluster import NOMINAL_CPU

LENGTH, VOCABULARY, BATCH = 12, 64, 8
TOLD = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_seen", "step")
# Its own: that numbers on a CPU are pinned for no GPU, and that tokens of a configuration are none.
pytestmark = pytest.mark.filterwarnings("ignore")
History = list[dict[str, float]]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Leaves nothing of accelerate's state to other tests, or to the ranks of the next."""
    yield
    AcceleratorState._reset_state(True)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def texts(count: int) -> list[Tensors]:
    """With unlike numbers of labels, so that batches weigh unlike."""
    drawn, found = torch.Generator().manual_seed(count), []
    for _ in range(count):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: int(torch.randint(0, 6, (), generator=drawn))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Two epochs of three batches, in an accumulated step of two and one of one."""
    usual = {
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": 13,
        "gradient_accumulation_steps": 2, "eval_strategy": "steps",
    }  # fmt: skip
    return TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, learning_rate=1e-2, max_grad_norm=0.5,
        warmup_steps=2, weight_decay=0.1, logging_steps=1, eval_steps=2, save_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True, **usual | options,
    )  # fmt: skip


def accuracy(given: Any) -> dict[str, float]:
    right = given.predictions[:, :-1].argmax(-1) == given.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "seen": float(len(given.label_ids))}


def trained(kind: Any, model: Any, folder: Path, resume: Path | None = None) -> History:
    """What the trainer has logged, which leaves the model trained and saved."""
    trainer = kind(
        model=model, args=arguments(folder), train_dataset=texts(24), eval_dataset=texts(13),
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trainer.save_model()
    return [{k: h[k] for k in TOLD if k in h} for h in trainer.state.log_history]


def with_noise() -> LlamaForCausalLM:
    model = llama()
    activate_neftune(model, 5.0)
    return model


def initialised(kind: Any, made: Any, folder: Path) -> History:
    """Logs of a trainer that makes its model."""
    if kind is Trainer:
        as_torchrun()
    given = arguments(folder, eval_strategy="no", save_strategy="no")
    trainer = kind(model_init=made, args=given, train_dataset=texts(24))
    trainer.train()
    if kind is Trainer:
        with pytest.raises(ConfigError, match="draws its trials on each rank by itself"):
            trainer.hyperparameter_search()
    return [{k: h[k] for k in TOLD if k in h} for h in trainer.state.log_history]


def test_the_model_may_be_made_by_the_trainer(tmp_path: Path) -> None:
    wanted = initialised(transformers.Trainer, llama, tmp_path)
    AcceleratorState._reset_state(True)
    layout = {"dp": 2}
    for history in run_ranks(2, lambda: initialised(Trainer, lambda: parallel(layout), tmp_path)):
        for ours, theirs in zip(history, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def noisy(layout: dict[str, Any], folder: Path) -> History:
    return initialised(Trainer, lambda: parallel(layout, make=with_noise), folder)


def test_noise_on_embeddings_is_the_same_on_every_layout(tmp_path: Path) -> None:
    """It is not that of torch's generator."""
    found = [run_ranks(n, noisy, x, tmp_path)[0] for n, x in ((1, {}), (2, {"dp": 2}))]
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    quiet = run_ranks(1, lambda: initialised(Trainer, lambda: parallel({}), tmp_path))[0]
    assert quiet[0]["loss"] != pytest.approx(found[0][0]["loss"], rel=1e-4)


def few(kind: Any, model: Any, folder: Path) -> list[Any]:
    """What is logged and predicted where the last batches of all kinds have one sample."""
    given = arguments(
        folder, per_device_eval_batch_size=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=1, save_strategy="no",
    )  # fmt: skip
    trainer = kind(
        model=model, args=given, train_dataset=texts(5), eval_dataset=texts(5),
        compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    answer = trainer.predict(texts(5))
    history = [{k: h[k] for k in TOLD if k in h} for h in trainer.state.log_history]
    return [history, answer.predictions, answer.label_ids]


def test_the_last_batch_may_be_of_one_sample(tmp_path: Path) -> None:
    wanted = few(transformers.Trainer, llama(), tmp_path)
    AcceleratorState._reset_state(True)
    for history, *answer in run_ranks(2, lambda: few(Trainer, parallel({"dp": 2}), tmp_path)):
        for ours, theirs in zip(history, wanted[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        for ours, theirs in zip(answer, wanted[1:], strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-5
            )


class OwnLoss(transformers.Trainer):
    """Makes its loss outside the model, of which it asks for the size of a configuration."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        labels, words = inputs.pop("labels"), model.config.vocab_size
        logits = (outputs := model(**inputs)).logits[:, :-1].reshape(-1, words)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1))
        return (loss, outputs) if return_outputs else loss


def test_a_trainers_own_loss_is_evaluated_with_metrics(tmp_path: Path) -> None:
    def seen(kind: Any, model: Any) -> dict[str, float]:
        trainer = kind(
            model=model, args=arguments(tmp_path, eval_strategy="no"), compute_metrics=accuracy
        )
        found = trainer.evaluate(texts(13))
        return {name: found[name] for name in ("eval_loss", "eval_accuracy")}

    wanted = seen(OwnLoss, llama())
    AcceleratorState._reset_state(True)
    assert seen(trainer_of(OwnLoss), parallel({})) == pytest.approx(wanted, rel=1e-5)


def as_torchrun() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}


def parallel(layout: dict[str, Any], *, make: Any = llama, **options: Any) -> Any:
    as_torchrun()
    batch = {k: torch.stack([t[k] for t in texts(BATCH)]) for k in ("input_ids", "labels")}
    return merakc.auto_parallel(make(), batch, cluster=NOMINAL_CPU, **layout, **options)


def on_ranks(layout: dict[str, Any], folder: Path, resume: Path | None) -> tuple[History, Tensors]:
    model = parallel(layout)
    history = trained(Trainer, model, folder, resume)
    return history, model.full_state_dict()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[History, Tensors]:
    """One process, by transformers' own Trainer."""
    model = llama()
    history = trained(transformers.Trainer, model, tmp_path_factory.mktemp("plain"))
    AcceleratorState._reset_state(True)
    return history, model.state_dict()


def compare(found: list[tuple[History, Tensors]], plain: tuple[History, Tensors]) -> None:
    for history, _ in found:
        assert len(history) == len(plain[0])
        for ours, theirs in zip(history, plain[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, plain[1][name], rtol=1e-5, atol=1e-6)


def test_a_run_is_that_of_one_process(plain: tuple[History, Tensors], tmp_path: Path) -> None:
    """Whole, and from its middle on another layout."""
    compare(run_ranks(2, on_ranks, {"tp": 2}, tmp_path / "first", None), plain)
    saved = llama().from_pretrained(tmp_path / "first", dtype=torch.float64).state_dict()
    for name, value in plain[1].items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)
    middle = tmp_path / "first" / "checkpoint-2"
    files = {p.name for p in (tmp_path / "first").iterdir() if p.is_file()}
    assert files == {
        "config.json", "generation_config.json", "model.safetensors", "training_args.bin"
    }  # fmt: skip
    layout = {"dp": 2, "state_shards": "zero-1"}
    compare(run_ranks(2, on_ranks, layout, tmp_path / "then", middle), plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bf16": True}, r"bf16=True\): auto_parallel\(..., precision=...\)"),
        ({"label_smoothing_factor": 0.1}, "the loss is part of the model"),
        ({"gradient_checkpointing": True}, "enable it before auto_parallel"),
        ({"neftune_noise_alpha": 5.0}, r"activate_neftune\(model, neftune_noise_alpha\) before"),
    ],
)
def test_what_would_be_wrong_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(model=parallel({}), args=arguments(tmp_path, **options))
    with pytest.raises(ConfigError, match="given a LlamaForCausalLM; give it the model that auto"):
        Trainer(model=llama(), args=arguments(tmp_path))


def wrong(folder: Path) -> list[str]:
    """transformers' own Trainer, and ranks whose batches differ."""
    model = parallel({"dp": 2})
    model.read_whole_batches()
    ids = torch.stack([t["input_ids"] for t in texts(BATCH + model.rank)][-BATCH:])
    with pytest.raises(MismatchError) as unlike:
        model(input_ids=ids, labels=ids)
    with pytest.raises(ConfigError) as refused:
        trained(transformers.Trainer, model, folder)
    given: dict[str, Any] = {"train_dataset": Stream()}
    given["args"] = arguments(folder, max_steps=1, eval_strategy="no")
    (first, *_) = Trainer(model=model, **given).get_train_dataloader()
    read = torch.stack([t["input_ids"] for t in texts(24)[:BATCH]])
    return [str(refused.value), str(unlike.value), str(torch.equal(first["input_ids"], read))]


class Stream(IterableDataset[Tensors]):
    """Whose batches accelerate would have rank 0 alone read."""

    def __iter__(self) -> Iterator[Tensors]:
        return iter(texts(24))


def test_what_ranks_would_do_each_by_itself(tmp_path: Path) -> None:
    """The wrong trainer and unlike batches are refused; streams are read by every rank."""
    for trainer, batches, reads_all in run_ranks(2, wrong, tmp_path):
        assert "merakc.integrations" in trainer
        assert "of the whole batch, input_ids" in batches
        assert reads_all == "True"
