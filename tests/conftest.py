"""What every test runs under: one thread of torch, the same hypothesis examples every time, and
every pass verified.
"""

from __future__ import annotations

import os

import hypothesis
import torch

# No deadline: a shared machine may stall for any time, and a slow example is no wrong one.
hypothesis.settings.register_profile("merakc", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("merakc")
torch.set_num_threads(1)
os.environ["MERAKC_CHECK"] = "1"  # read when merakc.passes.running is imported, here and by ranks
