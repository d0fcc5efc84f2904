"""Jobs of real sizes: their models are the published ones, and what a job misses is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import real_jobs
from benchmarks.real_jobs import JOBS, MOST_BYTES, MOST_S, Found, Job, plan_here, problems, rows_of
from merakc.planner.sources.source import load_source

# Of the reports and model cards, in billions.
PUBLISHED = {
    "Llama-3.1-405B": 405.9, "Qwen3-235B-A22B": 235.1, "DeepSeek-V3": 671.0, "gpt-oss-120b": 116.8,
    "Mixtral-8x7B": 46.7, "Gemma-3-27B": 27.0, "Llama-3-8B at 131072 tokens": 8.03,
    "BLOOM-176B": 176.2, "T5-11B": 11.3, "Whisper large-v3": 1.54,
    "ViT-22B": 21.7, "CLIP bigG": 2.54,
    "mT5-XXL": 11.9,  # and 1.0 of the output, which transformers 5 ties to the input
    "DiT-XL/2": 0.75,  # as diffusers has it: times and classes are embedded in each of the blocks
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_published_parameters(name: str, tmp_path: Path) -> None:
    given = real_jobs._source(JOBS[name], tmp_path)
    source = load_source(given, None if ":" in given else 8)
    count = sum(p.numel() for p in source.model.parameters()) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=0.02)


def test_a_job_is_planned_with_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_jobs.torch, "set_num_threads", lambda _: None)
    job = Job("tests.small_source:small", "h100", 2, 8, 0, degrees={"dp": 1, "tp": 1, "pp": 2})
    found = plan_here(job, neighbours=True)
    assert not found.error
    assert 0 < found.step_s <= found.used_s
    assert found.tried > len(real_jobs.OTHERS)
    assert not found.faster
    monkeypatch.setitem(JOBS, "small", job)
    assert rows_of({"small": found})[1][0] == "small"


def test_near_a_plan_are_other_ranks_of_experts() -> None:
    near = list(real_jobs._near({"dp": 1, "tp": 1, "pp": 2, "cp": 2}))
    assert near[0] == {"dp": 1, "tp": 1, "pp": 2, "cp": 2, "expert_parallel": True}
    assert {"dp": 2, "tp": 1, "pp": 2, "cp": 1, "expert_parallel": False} in near
    assert {"dp": 1, "tp": 1, "pp": 1, "cp": 4, "expert_parallel": True} in near
    assert all("cp" in one for one in near)
    assert not any("cp" in one for one in real_jobs._near({"dp": 1, "tp": 1, "pp": 2}))


def test_what_a_job_misses() -> None:
    good = Found(MOST_S, MOST_BYTES, "dp=1", 1.0, used_s=0.995)
    assert not problems(good)
    for change in (
        {"cpu_s": MOST_S + 1}, {"peak_bytes": MOST_BYTES + 1}, {"error": "too large"},
        {"faster": (("tp=2", 0.9),)}, {"used_s": 0.9},
    ):  # fmt: skip
        assert len(problems(dataclasses.replace(good, **change))) == 1  # type: ignore[arg-type]
