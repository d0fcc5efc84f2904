"""merakc: automatic 3D parallelism for PyTorch."""

from merakc.machines.garbage import few_collections

with few_collections():  # torch among it
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
    from merakc.train.parameters.optimizers import declare_elementwise
    from merakc.version import __version__

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
    "untie_layers",
]
