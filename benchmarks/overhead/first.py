"""The first step of a fresh process, phase by phase, as JSON (`benchmarks.overhead` starts it)."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(text: str) -> dict[str, float]:
    """Seconds of each phase. A plan is read from the file that is named, or written where there is
    none.
    """
    given = json.loads(text)
    start_s = time.perf_counter()
    import torch

    import merakc
    from benchmarks.overhead.runs import batch_of
    from benchmarks.overlap_steps import Size, build

    torch.set_num_threads(1)
    size = Size(*given["size"])
    path = Path(given["plan"]) if given["plan"] else None
    imported_s = time.perf_counter()
    model, batch = build(given["model"], size).train(), batch_of(size)
    built_s = time.perf_counter()
    known = path is not None and path.exists()
    parallel = merakc.auto_parallel(model, batch, plan=path if known else None)
    planned_s = time.perf_counter()
    optimizer = torch.optim.AdamW(parallel.parameters(), fused=True)
    parallel(**batch).loss.backward()
    optimizer.step()
    done_s = time.perf_counter()
    if path is not None and not known:
        parallel.plan_file.save(path)
    return {
        "import_s": imported_s - start_s,
        "build_s": built_s - imported_s,
        "plan_s": planned_s - built_s,
        "step_s": done_s - planned_s,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
