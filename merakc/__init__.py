"""merakc: automatic 3D parallelism for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from merakc.machines.garbage import few_collections

if TYPE_CHECKING:
    from merakc.api import auto_parallel, plan_for
    from merakc.errors import MerakError, MerakWarning
    from merakc.ir.plan import Plan
    from merakc.ir.plan_file import PlanFile, load_plan
    from merakc.ir.precision import Precision
    from merakc.machines.cluster import Cluster
    from merakc.passes.sharding.register import register_sharding
    from merakc.train.checkpoints.exporting import export
    from merakc.train.checkpoints.loading import Loaded, latest, load
    from merakc.train.checkpoints.saving import Saving, save
    from merakc.train.data.loading import dataloader, sampler
    from merakc.train.layers.sharing import Sharing, share_layers
    from merakc.train.layers.untying import untie_layers
    from merakc.train.model import ParallelModel
    from merakc.train.parameters.in_backward import step_in_backward
    from merakc.train.parameters.optimizers import declare_elementwise
    from merakc.version import __version__

# Where each is. It is imported once it is asked for: a command that shows a plan needs little.
_PLACES = {
    "auto_parallel": "api",
    "plan_for": "api",
    "MerakError": "errors",
    "MerakWarning": "errors",
    "Plan": "ir.plan",
    "PlanFile": "ir.plan_file",
    "load_plan": "ir.plan_file",
    "Precision": "ir.precision",
    "Cluster": "machines.cluster",
    "register_sharding": "passes.sharding.register",
    "export": "train.checkpoints.exporting",
    "Loaded": "train.checkpoints.loading",
    "latest": "train.checkpoints.loading",
    "load": "train.checkpoints.loading",
    "Saving": "train.checkpoints.saving",
    "save": "train.checkpoints.saving",
    "dataloader": "train.data.loading",
    "sampler": "train.data.loading",
    "Sharing": "train.layers.sharing",
    "share_layers": "train.layers.sharing",
    "untie_layers": "train.layers.untying",
    "ParallelModel": "train.model",
    "declare_elementwise": "train.parameters.optimizers",
    "step_in_backward": "train.parameters.in_backward",
    "__version__": "version",
}

__all__ = [
    "Cluster",
    "Loaded",
    "MerakError",
    "MerakWarning",
    "ParallelModel",
    "Plan",
    "PlanFile",
    "Precision",
    "Saving",
    "Sharing",
    "__version__",
    "auto_parallel",
    "dataloader",
    "declare_elementwise",
    "export",
    "latest",
    "load",
    "load_plan",
    "plan_for",
    "register_sharding",
    "sampler",
    "save",
    "share_layers",
    "step_in_backward",
    "untie_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'merakc' has no attribute {name!r}")
    with few_collections():  # torch is among it
        found = getattr(import_module(f"merakc.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
