"""Our Triton kernels without a GPU: run in Triton's interpreter, and compiled for three kinds.

Triton is imported from a folder of its own, in processes of their own: torch without CUDA takes
one that lies beside it for one that it can use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "triton"
ROOT = Path(__file__).parents[2]
CAPABILITIES = (80, 90, 100)
INTERPRETED = """
import json
import torch
from unittest.mock import patch
from merakc.gpu_check import ops
from merakc.kernels import scores

cpu, found = torch.device("cpu"), {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for sizes in ((5, 8, 300), (3, 16, 9001), (1, 4, 5)):
        for bias in (False, True):
            # In several blocks, some of which no label is in; float64 takes the plain formulas.
            fused = lambda x: x.dtype != torch.float64
            with patch.object(scores, "_is_fused", fused), patch.object(
                scores, "BLOCK_BYTES", sizes[0] * 4 * 4300
            ):
                errors = ops.scores_errors(cpu, sizes, dtype, bias=bias)
            found[f"{sizes}, {dtype}, bias={bias}"] = max(errors.values()) / ops.ALLOWED[dtype]
print(json.dumps(found))
"""
COMPILED = """
import json, subprocess, sys, tempfile
import triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from merakc.kernels import triton_scores as kernels

tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
types = {"scores": "*bf16", "labels": "*i64", "first": "i32"}
fixed = {"wide": 12288, "COLUMNS": kernels.COLUMNS}
found = []
for capability in json.loads(sys.argv[1]):
    for kernel in (kernels.summed, kernels.gradients):
        signature = {n: "constexpr" if n in fixed else types.get(n, "*fp32")
                     for n in kernel.arg_names}
        made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed),
                              target=GPUTarget("cuda", capability, 32),
                              options={"num_warps": kernels.WARPS})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
        found.append([kernel.__name__, capability, made.metadata.shared, used.stdout])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Compiled:
    """A kernel for GPUs of a compute capability: what each of its threads and blocks takes."""

    kernel: str
    capability: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        """Whether registers go to memory."""
        return self.stack_bytes > 0


def is_installed() -> bool:
    """Whether Triton lies in its folder, where `make install` puts it."""
    return (FOLDER / "triton").is_dir()


def _run(code: str, *arguments: str, **environment: str) -> Any:
    paths = os.pathsep.join((str(ROOT), str(FOLDER)))
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])
    return json.loads(ended.stdout.splitlines()[-1])


def interpreted() -> dict[str, float]:
    """The largest relative error of each case, in what is allowed."""
    found: dict[str, float] = _run(INTERPRETED, TRITON_INTERPRET="1")
    return found


def compiled() -> list[Compiled]:
    """Each kernel for each kind of GPU, by ptxas."""
    found = []
    for name, capability, shared_bytes, text in _run(COMPILED, json.dumps(CAPABILITIES)):
        used = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", text))
        figures = int(used["REG"]), int(used["STACK"]), shared_bytes
        found.append(Compiled(name, capability, *figures))
    return found
