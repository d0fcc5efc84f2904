"""TRL's `SFTTrainer` and `DPOTrainer` on a model of `auto_parallel`, in place of TRL's own.

As with `merakc.integrations.trainer`, the program stays as it is in one process. These trainers
make their losses of scores of each label, for which they put a forward on the model that a rank of
a parallel model cannot run, since it reads the head's weights. Steps compute the same scores from
the logits, by calls that a vocabulary can be split under.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial, wraps
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import trl
from trl.trainer import dpo_trainer, sft_trainer
from trl.trainer.utils import FusedCausalLMOutput

from merakc.errors import ConfigError
from merakc.integrations import trainer
from merakc.ir.batches import Rows
from merakc.train.model import ParallelModel


class _Scored:
    """What these trainers do otherwise for a parallel model."""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("peft_config") is not None:
            raise ConfigError(
                f"{type(self).__name__}(peft_config=...) puts adapters into the model after "
                "auto_parallel: give auto_parallel peft.get_peft_model(model, peft_config)"
            )
        referred = not isinstance(self, trl.DPOTrainer) or args or kwargs.get("ref_model")
        if hasattr(model, "peft_config") and not referred:
            raise ConfigError(
                f"{type(self).__name__} makes its reference of a copy of the adapters, inside a "
                "model that auto_parallel has compiled: give it ref_model, the model without its "
                "adapters as it is before it trains (new adapters change nothing)"
            )
        adapted = isinstance(model, ParallelModel) and hasattr(model, "get_base_model")
        if adapted:  # `Trainer` refuses it; peft's models have it from the model in them
            vars(model)["is_gradient_checkpointing"] = False
        with _whole(model) if adapted else nullcontext():
            super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        for each in (model, getattr(self, "ref_model", None)):
            if isinstance(each, ParallelModel):
                each.read_whole_batches()
                _score(each)
                if isinstance(self, trl.DPOTrainer):
                    _pair(each)


@contextmanager
def _whole(model: ParallelModel) -> Iterator[None]:
    """Keeps a trainer that is made from parts of a model with adapters: it scores like others."""
    source = model._own("_steps").source
    source.add_model_tags = partial(source.get_base_model().add_model_tags)  # which it asks for
    try:
        with ExitStack() as patched:
            for each in (sft_trainer, dpo_trainer):
                patched.enter_context(patch.object(each, "is_peft_model", lambda _: False))
            yield
    finally:
        del source.add_model_tags


def _score(model: ParallelModel) -> None:
    """Has steps compute scores where a trainer would have them from the forward that it has set."""
    del vars(model)["forward"]
    source = model._own("_steps").source
    source = source.get_base_model() if hasattr(source, "get_base_model") else source
    plain = source.forward

    @wraps(plain)
    def forward(
        _: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any
    ) -> Any:
        if fused_lm_head:
            return _scores(plain(*args, **kwargs), labels[:, 1:])
        return plain(*args, **kwargs) if labels is None else plain(*args, labels=labels, **kwargs)

    source.forward = MethodType(forward, source)


def _pair(model: ParallelModel) -> None:
    """Has a batch's samples be pairs: all that are chosen, and behind them those rejected."""
    steps = model._own("_steps")
    plan = replace(steps.planned.plan, batch_dims={"*": Rows(0, outer=2)})
    steps.planned = replace(steps.planned, plan=plan)
    steps.file = replace(steps.file, decisions=plan)


def _scores(outputs: Any, labels: torch.Tensor) -> FusedCausalLMOutput:
    """Of each label, B x S, by the logits of the tokens before; 0 where it is -100."""
    logits, known = outputs.logits[:, :-1].float(), labels != -100
    labels = labels.clamp(min=0)
    words = torch.arange(logits.shape[-1], device=logits.device)
    lost = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    lost = lost.view_as(labels)
    own = torch.where(words == labels.unsqueeze(-1), logits, 0).sum(-1, keepdim=True)
    log_shares = logits - own - lost.unsqueeze(-1)
    before = (logits > own) | ((logits == own) & (words < labels.unsqueeze(-1)))
    squares = (2 * log_shares.detach()).exp().sum(-1)
    return FusedCausalLMOutput(
        log_probs=-lost * known,
        entropy=-(log_shares.exp() * log_shares).sum(-1) * known,
        log_sum_sq_probs=squares.log() * known,
        mean_logits=logits.detach().mean(-1) * known,
        is_top1=(before.sum(-1) == 0) & known,
        label_mask=known,
        aux_loss=getattr(outputs, "aux_loss", None),
    )


@cache
def parallel(kind: Any) -> type[Any]:
    """A class of trainers like `kind`, TRL's or one that is made from it, for models of
    `auto_parallel`.
    """
    if not issubclass(kind, (trl.SFTTrainer, trl.DPOTrainer)):
        raise ConfigError(
            f"{kind.__name__} is no SFTTrainer and no DPOTrainer of TRL's: others score labels in "
            "ways of their own; write its loop as docs/losses-outside.md says"
        )
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    made = trainer.parallel(kind)
    return type(kind.__name__, (_Scored, made), names)


SFTTrainer = parallel(trl.SFTTrainer)
DPOTrainer = parallel(trl.DPOTrainer)
