"""Ranks of this machine, as `merakc.equality.ranks` starts them."""

from merakc.equality.ranks import RankError, RankTimeoutError, run_ranks

__all__ = ["RankError", "RankTimeoutError", "run_ranks"]
