from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import lines
from benchmarks.peers.lines import user_lines
from tests.benchmarks.peers.comparing import TINY

PLAIN = '''
from benchmarks.peers.training import Contestant

def build(training, form, rank):
    """What it is."""
    model = training.model()

    def step(batch):
        model(**batch).loss.backward()

    return Contestant(step, None)
'''
PEER = '''
from __future__ import annotations
import torch
from peer import wrap, unused
from benchmarks.peers.part import Part, Other
from benchmarks.peers.training import Contestant

OPTIONS = {
    "a": 1,
}

def build(training, form, rank):
    """What it is."""
    model = training.model()
    # a comment
    if training.tp > 1:
        model = wrap(model, OPTIONS)
    if form == "b":
        model = Part(model)

    def step(batch):
        model(**batch).loss.backward()

    def weights():
        return torch.zeros(1)

    return Contestant(step, weights)
'''
PART = '''
import math

class Part:
    """Layers."""

    def __init__(self, model):
        self.model = math.floor(model)

class Other:
    pass
'''


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"one_process": PLAIN, "peer": PEER, "part": PART}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(lines, "FOLDER", tmp_path)
    lines._parsed.cache_clear()


@pytest.mark.usefixtures("folder")
def test_counts_what_a_user_adds() -> None:
    try:
        assert user_lines("one_process", TINY, "a") == 0
        assert user_lines("peer", TINY, "a") == 0
        # The import of `wrap`, its call, and three lines of options.
        assert user_lines("peer", replace(TINY, tp=2), "a") == 5
        # `Part(model)`, the class, its `__init__` of two lines, and `import math`.
        assert user_lines("peer", TINY, "b") == 5
    finally:
        lines._parsed.cache_clear()


def test_counts_the_adapters() -> None:
    assert user_lines("one_process", TINY, "1 thread") == 0
    pipeline = replace(TINY, pp=2, micro_batches=2)
    merakc = user_lines("merakc_plan", pipeline, "auto")
    assert 0 < merakc < user_lines("torch_pipeline", pipeline, "Schedule1F1B")
    assert user_lines("torch_ddp", TINY, "zero-0") < user_lines("torch_ddp", TINY, "zero-1")
