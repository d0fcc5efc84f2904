"""The machines that a command is asked about."""

from __future__ import annotations

import re
from typing import cast

from merakc.machines.cluster import NOMINAL_CPU, NOMINAL_GPU, Cluster, DtypeName
from merakc.machines.cluster_files import hardware_for, preset_names

CLUSTERS = {"cpu": NOMINAL_CPU, "gpu": NOMINAL_GPU}
HELP = f"One of {', '.join(CLUSTERS)}, a preset, PRESET:NODES, or a cluster file."


def machines(name: str, dtype: str, ranks: int | None = None) -> Cluster:
    """The machines of that name, for products of a dtype: of `ranks` devices, or all.

    A preset without a number of nodes has as many as the ranks take. Raises `ClusterError` for a
    name that is none, and where there are too few devices.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    return hardware_for(name, ranks).flat(cast(DtypeName, dtype))


def is_built_in(name: str) -> bool:
    """Whether machines of that name need no file."""
    preset = re.fullmatch(r"([^:]+)(:\d{1,7})?", name)
    return name in CLUSTERS or (preset is not None and preset[1] in preset_names())
