"""Tests run side by side, each on one core: threads of one would only take turns with those of another.

Property tests draw the same examples in every run, and none fails for being slow on a busy machine.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
