"""The datasets, as standardised tensors in memory."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.data.download import fetch
from expunge.data.formats import parse_cifar, parse_idx
from expunge.data.hospitals import FEATURES, HOSPITALS, split_hospital
from expunge.data.sources import BUILT_IN, CIFAR10, FASHION_MNIST, MNIST, Source, read_verified
from expunge.errors import DataError, RequestError
from expunge.extras import folder_of

Split = tuple[Tensor, Tensor]
"""Images (n, c, h, w), uint8, and their labels (n,)."""

DIGITS_ORDER, TRAINED = Path(__file__).with_name("digits_order.txt"), 1437
"""The order in which digits are taken, and how many of them to train on: four of five of every digit."""


@dataclass(frozen=True)
class ImageDataset:
    """Images and labels, ready for a model; a table is images of one pixel, with a channel a column.

    Attributes:
        name: One of `DATASETS`.
        train_inputs: float32 (n, c, h, w), standardised per channel.
        train_labels: int64 (n,).
        test_inputs: As `train_inputs`.
        test_labels: As `train_labels`.
        classes: How many classes there are.
        white: (c,), what a white pixel is after standardising.
        owners: where the data has clients of its own, which training samples are whose.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int
    white: Tensor
    owners: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How a dataset is made: read its bytes, scale by `peak` to [0, 1], standardise with `mean` and `std`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[Source, Path], tuple[Split, Split]]
    source: Source
    peak: float = 255.0
    classes: int = 10


def read_digits(_source: Source, _data_dir: Path) -> tuple[Split, Split]:
    """Read scikit-learn's 1,797 digits, the first 1,437 of a fixed order to train on: stratified, always the same.

    The file is read as it lies in the package, which takes far longer to import than all digits to be read.
    """
    file = folder_of("sklearn") / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    order = np.loadtxt(DIGITS_ORDER, dtype=np.int64)
    images, labels = torch.from_numpy(rows[order, :-1]).view(-1, 1, 8, 8), torch.from_numpy(rows[order, -1]).long()
    return (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])


def read_idx_dataset(source: Source, data_dir: Path) -> tuple[Split, Split]:
    """Read the four IDX files of MNIST or Fashion-MNIST, padded by two black pixels: 28x28 to 32x32."""

    def split(prefix: str) -> Split:
        names = f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"
        images = parse_idx(read_verified(source, data_dir, names[0]), dimensions=3, name=names[0])
        labels = parse_idx(read_verified(source, data_dir, names[1]), dimensions=1, name=names[1])
        if len(images) != len(labels):
            raise DataError(f"{names[0]} and {names[1]} differ in length: replace both by good copies.")
        return F.pad(images, (2, 2, 2, 2)).unsqueeze(1), labels

    return split("train"), split("t10k")


def read_cifar_dataset(source: Source, data_dir: Path) -> tuple[Split, Split]:
    """Read CIFAR-10's five training batches and its test batch."""

    def batch(name: str) -> Split:
        return parse_cifar(read_verified(source, data_dir, name), name)

    images, labels = zip(*(batch(f"data_batch_{i}.bin") for i in range(1, 6)), strict=True)
    return (torch.cat(images), torch.cat(labels)), batch("test_batch.bin")


RECIPES: dict[str, Recipe] = {
    "digits": Recipe((0.3053,), (0.3760,), read_digits, BUILT_IN, peak=16.0),
    "mnist": Recipe((0.1307,), (0.3081,), read_idx_dataset, MNIST),
    "fashion-mnist": Recipe((0.2860,), (0.3530,), read_idx_dataset, FASHION_MNIST),
    "cifar10": Recipe((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), read_cifar_dataset, CIFAR10),
}

NATURAL: Mapping[str, tuple[str, ...]] = {"hospitals": HOSPITALS}
"""Datasets whose clients are those of life, by name: they come with the package and are not split."""

DATASETS: tuple[str, ...] = (*RECIPES, *NATURAL)
"""The names that `load` knows."""


def load(name: str, data_dir: str | Path | None = None, download: bool = False) -> ImageDataset:
    """Load a dataset into memory.

    Args:
        name: One of `DATASETS`.
        data_dir: The folder with the datasets' files; by default `EXPUNGE_DATA`, else `./data`.
        download: Fetch what is missing or damaged first.

    Raises:
        RequestError: When there is no dataset of that name.
        DataError: When a file is missing or damaged, or cannot be downloaded.

    Example:
        >>> digits = load("digits")
        >>> tuple(digits.train_inputs.shape), digits.classes
        ((1437, 1, 8, 8), 10)
    """
    if name not in DATASETS:
        raise RequestError(f"There is no dataset '{name}': choose one of {', '.join(DATASETS)}.")
    if name in NATURAL:
        return _hospitals()
    root = data_folder(data_dir)
    recipe = RECIPES[name]
    if download:
        fetch(recipe.source, root)
    return prepare(name, recipe, root)


def is_there(name: str, data_dir: str | Path | None = None) -> bool:
    """Whether a dataset's files lie in the data folder; they are not checked. The digits need scikit-learn instead.

    Example:
        >>> is_there("digits")
        True
    """
    if name in NATURAL:
        return True
    source = RECIPES[name].source
    if source is BUILT_IN:
        return find_spec("sklearn") is not None
    return all((data_folder(data_dir) / source.folder / file).exists() for file in source.checksums)


def data_folder(data_dir: str | Path | None) -> Path:
    """Where datasets lie: the folder that is given, else EXPUNGE_DATA, else ``data``."""
    return Path(data_dir or os.environ.get("EXPUNGE_DATA") or "data").expanduser()


def prepare(name: str, recipe: Recipe, data_dir: Path) -> ImageDataset:
    """Read a dataset by its recipe and standardise it.

    Example:
        >>> digits = prepare("digits", RECIPES["digits"], Path())
        >>> bool(digits.train_inputs.max() == digits.white)
        True
    """
    (train_images, train_labels), (test_images, test_labels) = recipe.read(recipe.source, data_dir)
    mean, std = torch.tensor(recipe.mean), torch.tensor(recipe.std)

    def standardise(images: Tensor) -> Tensor:
        # In place after the one conversion: CIFAR-10 as float32 is 0.7 GB, no second copy is wanted.
        scaled = images.to(torch.float32).div_(recipe.peak)
        return scaled.sub_(mean[:, None, None]).div_(std[:, None, None])

    return ImageDataset(
        name=name,
        train_inputs=standardise(train_images),
        train_labels=train_labels.long(),
        test_inputs=standardise(test_images),
        test_labels=test_labels.long(),
        classes=recipe.classes,
        white=(1 - mean) / std,
    )


def _hospitals() -> ImageDataset:
    splits = [split_hospital(name) for name in HOSPITALS]
    train, test = ([torch.cat(part) for part in zip(*own, strict=True)] for own in zip(*splits, strict=True))
    ends = list(accumulate(len(sick) for (_, sick), _ in splits))
    owners = [torch.arange(start, end) for start, end in pairwise([0, *ends])]
    return ImageDataset(
        name="hospitals",
        train_inputs=train[0][:, :, None, None],
        train_labels=train[1],
        test_inputs=test[0][:, :, None, None],
        test_labels=test[1],
        classes=2,
        white=torch.zeros(FEATURES),
        owners=dict(zip(HOSPITALS, owners, strict=True)),
    )
