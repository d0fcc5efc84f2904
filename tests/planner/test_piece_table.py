"""The pieces of a model, for any degree of tp and any samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby

import pytest
import torch
import transformers

from benchmarks.models import MODELS
from merakc.costs.work import pieces
from merakc.costs.work.pieces import cut_pieces, part_starts
from merakc.costs.work.scaled import SAMPLES
from merakc.errors import MerakError
from merakc.frontend.record import Recording
from merakc.ir.batches import BatchLayout
from merakc.ir.strategy import Form, Strategy
from merakc.lowering.lowered import make_plan
from merakc.machines.cluster import NOMINAL_GPU
from merakc.planner.piece_table import FEWEST, PieceTable
from tests.coupled_models import TOWERS
from tests.recorded import one_of_several
from tests.small_source import Two


@cache
def llama(samples: int) -> Recording:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(samples, 64, dtype=torch.long)
    return one_of_several(model, {"input_ids": ids, "labels": ids})


@cache
def mixtral(samples: int) -> Recording:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    ids = torch.zeros(samples, 64, dtype=torch.long)
    return one_of_several(model, {"input_ids": ids, "labels": ids})


@cache
def gpt_oss(samples: int) -> Recording:
    """Layers of windows and of whole texts take turns."""
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=9, head_dim=8,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, sliding_window=16,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    ids = torch.zeros(samples, 64, dtype=torch.long)
    return one_of_several(model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("record", "form", "samples"),
    [
        (llama, Form(1), 5),
        (llama, Form(2), 2),
        (llama, Form(2, sequence_parallel=True), 5),
        (llama, Form(cp=2), 2),
        (gpt_oss, Form(2), 5),
        (gpt_oss, Form(cp=2, expert_parallel=True), 4),
        # the samples of each rank; and sequences, where these do not divide over ranks
        (mixtral, Form(cp=2, expert_parallel=True), 6),
        (mixtral, Form(cp=2, expert_parallel=True), 5),
        (mixtral, Form(cp=8, expert_parallel=True), 5),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_pieces_are_those_of_the_plans_own_graph(
    record: Callable[[int], Recording], form: Form, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_BYTES", 0)  # so small a model's values are of about that
    found = PieceTable(record, NOMINAL_GPU).pieces(form, samples)
    lowered = make_plan(
        record(samples),
        Strategy(
            tp=form.tp,
            micro_batches=2,
            sequence_parallel=form.sequence_parallel,
            cp=form.cp,
            expert_parallel=form.expert_parallel,
        ),
        NOMINAL_GPU,
    )
    local = lowered.stages.local[0]
    wanted = cut_pieces(local, runs=-(-FEWEST // len(part_starts(local))))
    assert [p.path for p in found] == [p.path for p in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.work == other.work
        assert (one.saved_bytes, one.handed_bytes) == (other.saved_bytes, other.handed_bytes)
        assert one.parameter_count == other.parameter_count


def test_a_model_is_recorded_twice_for_all_forms() -> None:
    asked: list[int] = []

    def record(samples: int) -> Recording:
        asked.append(samples)
        return llama(samples)

    table = PieceTable(record, NOMINAL_GPU)
    for tp in (1, 2, 4):
        for samples in (1, 2, 8):
            table.pieces(Form(tp), samples)
    assert asked == list(SAMPLES)


def test_a_form_that_cannot_be_is_refused_once() -> None:
    def record(samples: int) -> Recording:
        return one_of_several(Two(16), (torch.ones(samples, 8), torch.ones(())))

    table = PieceTable(record, NOMINAL_GPU)
    assert len(table.pieces(Form(1), 4)) > 1  # no blocks, but places to cut
    for _ in range(2):
        with pytest.raises(MerakError):
            table.pieces(Form(4096), 4)
    assert list(table.refused) == [Form(4096)]


def test_it_knows_of_a_loss_that_couples_samples() -> None:
    def record(samples: int) -> Recording:
        return TOWERS.record(BatchLayout((samples, samples), 1))

    plain = PieceTable(llama, NOMINAL_GPU)
    plain.pieces(Form(1), 2)
    assert not plain.couples
    table = PieceTable(record, NOMINAL_GPU)
    assert table.pieces(Form(1), 2)
    assert table.couples


def test_a_collective_between_blocks_of_two_kinds_is_no_block() -> None:
    """Where a stem's blocks meet others, each rank's copy of what passes has no module."""
    case = MODELS["resnet"]
    table = PieceTable(lambda n: one_of_several(case.model(), case.batch(n)), NOMINAL_GPU)
    alone, split = (
        [path for path, _ in groupby(piece.path for piece in table.pieces(Form(tp), 2))]
        for tp in (1, 2)
    )
    assert split == alone == ["stem", "blocks", ""]
