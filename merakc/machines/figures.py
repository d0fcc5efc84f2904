"""What figures of machines may be, as pydantic checks them in cluster files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# What machines have, widely: figures in another unit (GB/s, TFLOP/s, microseconds) lie outside.
FlopsPerS = Annotated[float, Field(ge=1e8, allow_inf_nan=False)]
BytesPerS = Annotated[float, Field(ge=1e5, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, le=1)]  # a share that may be nothing
Count = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(ge=0)]
DtypeName = Literal["float64", "float32", "tf32", "float16", "bfloat16", "float8"]

STRICT = ConfigDict(extra="forbid")
# Sizes, and what was measured at each, from small to large.
Points = tuple[tuple[Positive, Positive], ...]
