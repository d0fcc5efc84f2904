"""The machines that a command is asked about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from merakc.errors import ConfigError
from merakc.ir.graph import dtype_name
from merakc.ir.plan import Plan
from merakc.ir.plan_file import PlanFile
from merakc.machines.cluster import Cluster
from merakc.machines.cluster_files import NOMINAL, hardware_for, preset_names
from merakc.machines.figures import DtypeName

if TYPE_CHECKING:
    from merakc.planner.sources.source import Source

# For plans without a report, which do not say for which machines they were made.
USUAL = "gpu"
HELP = (
    f"One of {', '.join(NOMINAL)}, a preset, PRESET:NODES, or a cluster file; "
    "with +tf32 behind it where products of 32 bits are in TF32."
)


def machines(name: str, dtype: str, ranks: int | None = None) -> Cluster:
    """The machines of that name, for products of a dtype: of `ranks` devices, or all.

    A preset without a number of nodes has as many as the ranks take. Raises `ClusterError` for a
    name that is none, and where there are too few devices.
    """
    built_in, _, tf32 = name.partition("+")
    if built_in in NOMINAL and tf32 in ("", "tf32"):
        return NOMINAL[built_in].rounding() if tf32 else NOMINAL[built_in]
    return hardware_for(name, ranks).flat(cast(DtypeName, dtype))


def is_built_in(name: str) -> bool:
    """Whether machines of that name need no file."""
    preset = re.fullmatch(r"([^:+]+)(:\d{1,7})?(\+tf32)?", name)
    return name.removesuffix("+tf32") in NOMINAL or (
        preset is not None and preset[1] in preset_names()
    )


def machines_of(file: PlanFile) -> str:
    """The machines that a plan names. A path in it is not followed: it may be anyone's.

    Raises `ConfigError` for one.
    """
    found = (file.report.machines if file.report else "") or USUAL
    if not is_built_in(found):
        raise ConfigError(
            f"the plan was made for the machines of {found!r}, which is no preset; give that file "
            "with --from"
        )
    return found


def product_dtype(plan: Plan, source: Source) -> str:
    """What products are computed in."""
    if plan.precision:
        return plan.precision.compute
    floats = [p.dtype for p in source.model.parameters() if p.is_floating_point()]
    return dtype_name(floats[0]) if floats else "float32"
