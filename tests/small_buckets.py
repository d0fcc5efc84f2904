"""Buckets of few bytes, of which small models have several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from merakc.analysis import buckets
from merakc.costs.work.sharded import _like_state_bytes


@contextmanager
def small_buckets(bucket_bytes: int = 20_000) -> Iterator[None]:
    """Buckets are of so many bytes here. What was priced with others is forgotten, and so is what
    is priced meanwhile.
    """
    with (
        patch.object(buckets.plan_buckets, "__defaults__", (bucket_bytes,)),
        patch.object(buckets.bucket_names, "__defaults__", (bucket_bytes,)),
    ):
        _like_state_bytes.cache_clear()
        try:
            yield
        finally:
            _like_state_bytes.cache_clear()
