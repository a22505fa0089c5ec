"""Tests run side by side, each on one core: threads of one would only take turns with those of another."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
