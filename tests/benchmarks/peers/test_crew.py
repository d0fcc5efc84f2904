from __future__ import annotations

import pytest

from benchmarks.peers.crew import Crew, CrewError
from benchmarks.peers.networks import LOOPBACK
from benchmarks.peers.training import Training

TINY = Training(ranks=2, samples=2, sequence=8, hidden=16, layers=1, vocabulary=32)


def test_ranks_train_compare_and_leave_communication_out() -> None:
    with Crew("torch_ddp", "zero-0", TINY, LOOPBACK, probe=True) as crew:
        crew.answers()
        answers = crew.ask("train", steps=2)
        assert len(answers) == 2
        assert all(0 < a["step_s"] < 60 and a["cpu_s"] > 0 for a in answers)
        assert 0 < crew.ask("compare")[0]["error"] < 1e-3
        assert all(a["step_s"] > 0 for a in crew.ask("train", steps=1, muted=True))
        model = TINY.model()
        recorded = crew.ask("record")
        assert recorded[0]["bytes"] >= 4 * sum(p.numel() for p in model.parameters())
        assert all(a["alone_s"] > 0 for a in crew.ask("replay"))
        # Left out, gradients were not added up: the ranks have gone their own ways.
        assert crew.ask("compare")[0]["error"] > 1e-3
        with pytest.raises(CrewError, match=r"torch_ddp zero-0 ended:\n(.|\n)*no_such_command"):
            crew.ask("no_such_command")
    assert all(process.returncode is not None for process in crew.ranks)


def test_a_rank_that_fails_is_quoted() -> None:
    with (
        Crew("no_such_peer", "zero-0", TINY, LOOPBACK) as crew,
        pytest.raises(CrewError, match="no_such_peer"),
    ):
        crew.answers()
