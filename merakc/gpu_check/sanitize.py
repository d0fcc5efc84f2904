"""Our kernels under compute-sanitizer: accesses beyond what is allocated."""

from __future__ import annotations

import shutil
import subprocess
import sys

TOOLS = ("memcheck",)  # racecheck fails itself on kernels of Triton
CODE = """
import torch
from merakc.gpu_check.ops import scores_errors
device = torch.device("cuda")
print(scores_errors(device, (33, 16, 5000), torch.bfloat16, bias=True))
"""


def found() -> list[str]:
    """What it reports, a line each; raises `RuntimeError` where it is not installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise RuntimeError("compute-sanitizer is not on the path; it comes with the CUDA toolkit")
    wrong = []
    for name in TOOLS:
        call = [tool, "--tool", name, "--error-exitcode", "7", "--kernel-name",
                "kernel_substring=summed", "--kernel-name", "kernel_substring=gradients",
                sys.executable, "-c", CODE]  # fmt: skip
        ended = subprocess.run(call, capture_output=True, text=True, check=False)
        if ended.returncode:
            lines = [x for x in ended.stdout.splitlines() if x.startswith("=====")]
            wrong.append(f"{name}: " + " ".join((lines or ended.stderr.splitlines()[-1:])[:3]))
    return wrong
