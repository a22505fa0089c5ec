"""Datasets, their split over clients, and what some clients do to them: backdoors and wrong labels."""

from expunge.data.backdoor import Backdoor, poison, stamp
from expunge.data.datasets import DATASETS, NATURAL, ImageDataset, is_there, load
from expunge.data.mislabelling import Mislabelling, mislabel
from expunge.data.partition import dirichlet

__all__ = [
    "DATASETS",
    "NATURAL",
    "Backdoor",
    "ImageDataset",
    "Mislabelling",
    "dirichlet",
    "is_there",
    "load",
    "mislabel",
    "poison",
    "stamp",
]
