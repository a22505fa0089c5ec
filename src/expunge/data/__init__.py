"""Datasets, their split over clients, and the backdoor that an attacker plants in them."""

from expunge.data.backdoor import Backdoor, poison, stamp
from expunge.data.datasets import DATASETS, ImageDataset, is_there, load
from expunge.data.partition import dirichlet

__all__ = ["DATASETS", "Backdoor", "ImageDataset", "dirichlet", "is_there", "load", "poison", "stamp"]
