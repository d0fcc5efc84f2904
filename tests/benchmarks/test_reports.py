"""What pages say of the run that made them."""

from __future__ import annotations

from benchmarks.reports import told_command, told_run


def test_a_command_without_places() -> None:
    given = ["--rounds", "5", "--cache", "somewhere", "--json=a.json", "--doc", "b.md", "--quick"]
    told = told_command("benchmarks.state_sharding", given)
    assert told == "python -m benchmarks.state_sharding --rounds 5 --quick"


def test_a_run() -> None:
    told = told_run("benchmarks.zero_study", [])
    assert told.startswith("`python -m benchmarks.zero_study`, 20")
    assert "torch" in told
