from __future__ import annotations

import json
from pathlib import Path

from benchmarks.overhead.first import main
from merakc.ir.plan_file import load_plan


def test_a_plan_is_written_once_and_then_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    given = json.dumps({"model": "gpt2", "size": [2, 64, 16, 4], "plan": str(path)})
    found = main(given)
    assert set(found) == {"import_s", "build_s", "plan_s", "step_s"}
    plan = load_plan(path)
    path.write_text(path.read_text())
    before = path.stat().st_mtime_ns
    main(given)
    assert path.stat().st_mtime_ns == before
    assert load_plan(path) == plan
