"""merakc: automatic 3D parallelism for PyTorch."""

from merakc.garbage import few_collections

with few_collections():  # torch among it
    from merakc.api import auto_parallel
    from merakc.cluster import Cluster
    from merakc.errors import MerakError, MerakWarning
    from merakc.ir.plan import Plan, load_plan
    from merakc.ir.precision import Precision
    from merakc.model import ParallelModel
    from merakc.passes.register import register_sharding
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
