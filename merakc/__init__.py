"""merakc: automatic 3D parallelism for PyTorch."""

from merakc.machines.garbage import few_collections

with few_collections():  # torch among it
    from merakc.api import auto_parallel
    from merakc.errors import MerakError, MerakWarning
    from merakc.ir.plan import Plan, load_plan
    from merakc.ir.precision import Precision
    from merakc.machines.cluster import Cluster
    from merakc.passes.sharding.register import register_sharding
    from merakc.train.model import ParallelModel
    from merakc.version import __version__

__all__ = [
    "Cluster",
    "MerakError",
    "MerakWarning",
    "ParallelModel",
    "Plan",
    "Precision",
    "__version__",
    "auto_parallel",
    "load_plan",
    "register_sharding",
]
