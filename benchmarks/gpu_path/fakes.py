"""The whole of `auto_parallel` and some steps on CUDA tensors that hold nothing.

Fake tensors know shapes, types and devices: a call that joins a CPU's with a GPU's is refused as on
a GPU. The process group is torch's fake one, of as many ranks as the layout has; every rank takes
its turn, in a process of its own.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.cpp_extension import include_paths

import merakc
from benchmarks.gpu_path.races import LAYOUTS as RACED
from benchmarks.gpu_path.races import LENGTH, SAMPLES, Layout, Net
from benchmarks.ranks import run_ranks
from merakc import api
from merakc.ir.batches import BatchLayout
from merakc.ir.plan import Plan
from merakc.kernels.host import ROOM
from merakc.machines import start
from merakc.machines.cluster import NOMINAL_GPU
from merakc.runtime import agreement, groups
from merakc.runtime.executor import Step
from merakc.runtime.streams import stand_in
from merakc.train import model as training
from merakc.train import starting, steps
from merakc.train.parameters.parts import Parts

STEPS = 3
# A step's host waits for its device where it must know what to do: whether all ranks agree and all
# is finite, and by what its gradients are multiplied.
MOST_WAITS = 3
SOURCE = Path(__file__).with_name("guard.cpp")


def compiler() -> str | None:
    """The C++ compiler, without which there are no fake CUDA tensors."""
    return shutil.which("g++") or shutil.which("clang++")


def load_guard() -> None:
    """Lets this process have fake tensors on `cuda`, where torch was built without."""
    if torch.version.cuda is not None:
        return
    found = compiler()
    assert found is not None, "a C++ compiler is needed"
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/guard.so"
        library = Path(torch.__file__).parent / "lib"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        flags = ["-shared", "-fPIC", "-O2", "-DNDEBUG", "-std=c++20", abi]
        include = [f"-I{path}" for path in include_paths()]
        link = [f"-L{library}", "-lc10"]
        command = [found, *flags, *include, str(SOURCE), "-o", made, *link]
        subprocess.run(command, check=True, capture_output=True)
        ctypes.CDLL(made)


@dataclass
class Told:
    """What a rank did in its steps."""

    calls: int = 0  # on the device
    aside: int = 0  # of these, beside the computing
    waits: int = 0  # of the host for its device
    copies: int = 0  # to the host and back, beside the computing
    blocking: int = 0  # copies between host and device that the host waits for
    faults: list[str] = field(default_factory=list)


class Watching(TorchDispatchMode):
    """Looks at the device of every tensor, and answers what a host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.is_aside = self.in_program = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at one call."""
        kwargs, told = kwargs or {}, self.told
        out = func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs, out))
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        kinds = {t.device.type for t in tensors if t.dim()}
        told.calls += "cuda" in kinds
        told.aside += "cuda" in kinds and self.is_aside
        if func is torch.ops.aten._to_copy.default and len(kinds) > 1:
            told.blocking += not kwargs.get("non_blocking")
        elif "cpu" in kinds and self.in_program and func is not ROOM:
            told.faults.append(f"{func} has a tensor of the CPU")
        return out

    def number(self, _mode: Any, _func: Any, tensor: torch.Tensor) -> Any:
        """What a host reads of a tensor that holds nothing."""
        self.told.waits += tensor.device.type == "cuda"
        return tensor.dtype is torch.bool or 0.0

    # ------------------------------------------------------------------ streams

    def aside(self) -> AbstractContextManager[Any]:
        """What is issued inside runs aside."""
        return patch.object(self, "is_aside", True)

    def mark(self) -> int:
        """The end of what runs aside so far."""
        return self.told.aside

    def join(self, mark: int) -> None:
        """The computing waits for a mark."""
        assert mark <= self.told.aside

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's on the device."""
        return tensor.to("cuda:0", non_blocking=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor, back: bool) -> Callable[[], None]:
        """A copy between host and device, for which neither waits."""
        kinds = source.device.type, target.device.type
        if kinds != (("cpu", "cuda") if back else ("cuda", "cpu")):
            self.told.faults.append(f"a copy from {kinds[0]} to {kinds[1]}, back: {back}")
        self.told.copies += 1
        return lambda: None


def _fill(out: list[Any], own: Any, group: Any = None) -> None:
    """All ranks have what this one has."""
    del group
    out[:] = [own] * len(out)


def _even_layout(_args: Any, _kwargs: Any, plan: Plan, dp_rank: int, *_: Any, **more: Any) -> Any:
    """All dp ranks have as many samples, which their hosts tell each other."""
    del more
    return BatchLayout((SAMPLES // plan.dp,) * plan.dp, plan.micro_batches, dp_rank)


def _numbers(tensor: FakeTensor) -> Any:
    """A flat list of zeros, for which a host waits once."""
    return [0.0 * tensor.flatten()[0].item()] * tensor.numel()


_HARDWARE = SimpleNamespace(
    total_memory=80 * 10**9, name="fake", multi_processor_count=132, major=9, minor=0
)
# What needs a device, another rank or what tensors hold, and what stands for it.
_INSTEAD: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.cuda, "get_device_properties", lambda _=None: _HARDWARE),
    (torch.cuda, "device_count", lambda: 1),
    (torch.cuda, "set_device", lambda _: None),
    (start, "_check_own_gpus", lambda _: None),  # all ranks would have this one
    (torch.cuda, "get_device_name", lambda _=None: _HARDWARE.name),
    (torch.cuda, "get_device_capability", lambda _=None: (9, 0)),
    (api, "_priced", lambda *_, **more: (None, None)),  # from what all ranks have measured
    (starting, "start_job", lambda _: None),
    (training, "check_around", lambda _: None),
    (training, "hold", lambda *_: None),  # its type of parameters would hide the fake one
    (training, "follow", lambda *_: None),
    (dist, "all_gather_object", _fill),
    (FakeTensor, "tolist", _numbers),
    (Parts, "compare", lambda *_: None),
    (Parts, "put", lambda own, name, _: own.taken.add(name)),
    (agreement, "_sample", lambda *_: b""),
    (agreement, "digest", lambda _: ""),
    (steps, "layout_of", _even_layout),
)


@contextmanager
def _as_on_a_gpu(watching: Watching, mode: FakeTensorMode) -> Iterator[None]:
    """While it is entered there is a GPU that holds nothing; all ranks do what this one does."""
    run, first = Step.run, groups.from_rank_0

    def faked(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            with mode:
                return function(*args, **more)

        return called

    made = ((api, "_build"), (training.ParallelModel, "_run_by"))

    def ran(step: Step) -> None:
        with patch.object(watching, "in_program", True):
            run(step)

    here: Callable[[Callable[[], Any]], Any] = lambda make: make()  # noqa: E731
    with ExitStack() as stack:
        others = [(owner, name, faked(getattr(owner, name))) for owner, name in made]
        for owner, name, instead in (*_INSTEAD, *others, (Step, "run", ran)):
            stack.enter_context(patch.object(owner, name, instead))
        for module in [*sys.modules.values()]:
            if getattr(module, "from_rank_0", None) is first:
                stack.enter_context(patch.object(module, "from_rank_0", here))
        stack.enter_context(stand_in("cuda", lambda _: watching))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer")  # whose memory is nowhere
        reads = {
            torch.ops.aten._local_scalar_dense.default: watching.number,
            torch.ops.aten.equal.default: lambda *_: True,  # of two ranks' constants
        }
        stack.enter_context(patch.dict(op_implementations_dict, reads))
        yield


def steps_of(layout: Layout, rank: int) -> Told:
    """What one rank of a layout does in some steps."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)  # type: ignore[no-untyped-call]
    watching, mode = Watching(), FakeTensorMode(allow_non_fake_inputs=True)
    each = torch.zeros(SAMPLES // layout.dp, LENGTH, dtype=torch.long)
    with _as_on_a_gpu(watching, mode):
        model = merakc.auto_parallel(
            Net(), (each, each), dp=layout.dp, tp=layout.tp, pp=layout.pp, device="cuda:0",
            **{"cluster": NOMINAL_GPU, **layout.options},
        )  # fmt: skip
        with mode, watching:
            for _ in range(STEPS):
                loss = model(each, each)
                with torch.no_grad():
                    # What torch's engine calls, which will not run without a GPU.
                    handed = loss.grad_fn.apply(torch.ones_like(loss))
        told, gradients = watching.told, [g for g in handed if g is not None]
        held = [loss, *model.parameters(), *gradients]
        told.faults += [f"a tensor on {t.device}" for t in held if t.device.type != "cuda"]
        if not gradients:
            told.faults.append("no gradients")
        if bool(told.copies) != ("offload" in layout.options):
            told.faults.append(f"{told.copies} copies to the host and back")
    dist.destroy_process_group()
    return told


def _in_turn(layout: Layout) -> list[Told]:
    dist.destroy_process_group()  # gloo's, of this process alone
    load_guard()
    return [steps_of(layout, rank) for rank in range(layout.ranks)]


@dataclass
class Faked:
    """What was found on a layout; numbers are of a step, of the rank that has most."""

    layout: str
    calls: int
    aside: int
    waits: int
    blocking: int
    faults: list[str]


def faked(layout: Layout) -> Faked:
    """Runs a layout's ranks on fake tensors."""
    (ranks,) = run_ranks(1, _in_turn, layout)
    faults = [f"rank {r}: {text}" for r, told in enumerate(ranks) for text in told.faults]
    numbers = {n: max(getattr(t, n) for t in ranks) // STEPS for n in
               ("calls", "aside", "waits", "blocking")}  # fmt: skip
    if numbers["blocking"]:
        faults.append(f"the host waits for {numbers['blocking']} copies a step")
    if numbers["waits"] > MOST_WAITS:
        faults.append(f"the host waits {numbers['waits']} times a step")
    return Faked(str(layout), **numbers, faults=faults)


LAYOUTS = (
    Layout(1, 1, 1, {"micro_batches": 4}),
    Layout(1, 1, 1, {"micro_batches": 4, "precision": "bf16-mixed"}),
    Layout(1, 1, 1, {"micro_batches": 4, "precision": "fp16-mixed"}),
    *RACED,
)
