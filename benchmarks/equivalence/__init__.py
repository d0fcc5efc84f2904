"""`python -m benchmarks.equivalence TABLE`: every way to train gives what one process gives.

`layouts`: models in layouts of up to eight ranks; `schedules`: every order of work and every
recomputation; `overlap`: communication under computation; `state`: sharded state, its bytes too.
"""
