import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.idx_files import idx
from expunge.data import is_there, load
from expunge.data.datasets import RECIPES, Recipe, prepare
from expunge.errors import DataError, RequestError
from expunge.extras import MissingExtraError


def idx_files(train: int, test: int) -> dict[str, bytes]:
    files = {}
    for prefix, count in (("train", train), ("t10k", test)):
        images = torch.arange(count * 28 * 28).reshape(count, 28, 28) % 256
        files[f"{prefix}-images-idx3-ubyte.gz"] = idx(images.to(torch.uint8))
        files[f"{prefix}-labels-idx1-ubyte.gz"] = idx((torch.arange(count) % 10).to(torch.uint8))
    return files


def cifar_files() -> dict[str, bytes]:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: (bytes([i]) + bytes([i]) * 1024 + bytes(2048)) * 2 for i, name in enumerate(names)}


def install(name: str, files: Mapping[str, bytes], data_dir: Path) -> Recipe:
    """Write the files where the dataset's recipe looks for them, and return it with their checksums."""
    recipe = RECIPES[name]
    checksums = {file: hashlib.sha256(blob).hexdigest() for file, blob in files.items()}
    folder = data_dir / recipe.source.folder
    folder.mkdir(parents=True)
    for file, blob in files.items():
        (folder / file).write_bytes(blob)
    return replace(recipe, source=replace(recipe.source, checksums=checksums))


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_dataset_is_padded_and_standardised(name: str, tmp_path: Path) -> None:
    recipe = install(name, idx_files(train=3, test=2), tmp_path)
    dataset = prepare(name, recipe, tmp_path)
    assert dataset.train_inputs.shape == (3, 1, 32, 32)
    assert dataset.test_inputs.shape == (2, 1, 32, 32)
    assert dataset.train_inputs.dtype == torch.float32
    assert dataset.train_labels.dtype == torch.int64
    assert dataset.test_labels.tolist() == [0, 1]
    black = -recipe.mean[0] / recipe.std[0]
    assert dataset.train_inputs[0, 0, 0, 0].item() == pytest.approx(black)
    # Pixel 255 of the first image is white and lies in row 9, column 3 of 28x28.
    assert dataset.train_inputs[0, 0, 9 + 2, 3 + 2].item() == pytest.approx(dataset.white.item())


def test_cifar_keeps_batches_in_order_and_channels_apart(tmp_path: Path) -> None:
    recipe = install("cifar10", cifar_files(), tmp_path)
    dataset = prepare("cifar10", recipe, tmp_path)
    assert dataset.train_inputs.shape == (10, 3, 32, 32)
    assert dataset.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert dataset.test_labels.tolist() == [5, 5]
    mean, std = torch.tensor(recipe.mean), torch.tensor(recipe.std)
    pixel = dataset.test_inputs[0, :, 31, 31] * std + mean
    torch.testing.assert_close(pixel, torch.tensor([5 / 255, 0.0, 0.0]), atol=1e-6, rtol=0)


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    files = idx_files(train=3, test=2)
    files["train-labels-idx1-ubyte.gz"] = idx(torch.zeros(2, dtype=torch.uint8))
    recipe = install("mnist", files, tmp_path)
    with pytest.raises(DataError, match="differ in length"):
        prepare("mnist", recipe, tmp_path)


def test_digits_are_split_once_and_for_all() -> None:
    first, second = load("digits"), load("digits")
    assert torch.equal(first.train_inputs, second.train_inputs)
    assert len(first.test_labels) == 360
    counts = torch.bincount(first.test_labels, minlength=10)
    assert counts.min() >= 34
    assert counts.max() <= 37
    inputs = torch.cat([first.train_inputs, first.test_inputs])
    assert inputs.mean().item() == pytest.approx(0, abs=1e-3)
    assert inputs.std().item() == pytest.approx(1, abs=1e-3)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(RequestError, match="digits, mnist, fashion-mnist, cifar10"):
        load("imagenet")


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "digits"])
def test_missing_file_names_folder_file_and_ways_to_get_it(name: str, tmp_path: Path) -> None:
    source = RECIPES[name].source
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    sentence = str(caught.value)
    for part in (str(tmp_path / source.folder), next(iter(source.checksums)), "EXPUNGE_DATA", "--download"):
        assert part in sentence
    assert "\n" not in sentence


def test_a_folder_in_place_of_the_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz").mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be read"):
        load("mnist", tmp_path)


def test_wrong_checksum_is_refused(tmp_path: Path) -> None:
    install("mnist", idx_files(train=1, test=1), tmp_path)
    with pytest.raises(DataError, match="damaged"):
        load("mnist", tmp_path)


def test_data_folder_comes_from_argument_then_environment_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EXPUNGE_DATA", raising=False)
    with pytest.raises(DataError, match=r"in data/MNIST"):
        load("mnist")
    monkeypatch.setenv("EXPUNGE_DATA", "elsewhere")
    with pytest.raises(DataError, match=r"in elsewhere/MNIST"):
        load("mnist")
    with pytest.raises(DataError, match=r"in given/MNIST"):
        load("mnist", "given")


REAL = {"mnist": (60_000, 1), "fashion-mnist": (60_000, 1), "cifar10": (50_000, 3)}


def _is_here(name: str) -> bool:
    root = os.environ.get("EXPUNGE_DATA")
    return root is not None and (Path(root) / RECIPES[name].source.folder).is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not _is_here(name), reason=f"EXPUNGE_DATA has no {name}"))
        for name in REAL
    ],
)
def test_real_files(name: str) -> None:
    samples, channels = REAL[name]
    dataset = load(name)
    assert dataset.train_inputs.shape == (samples, channels, 32, 32)
    assert dataset.test_inputs.shape == (10_000, channels, 32, 32)
    assert torch.bincount(dataset.test_labels).numel() == dataset.classes
    # The constants are those of the unpadded training images.
    border = 2 if channels == 1 else 0
    inner = dataset.train_inputs[:, :, border : 32 - border, border : 32 - border]
    torch.testing.assert_close(inner.mean(dim=(0, 2, 3)), torch.zeros(channels), atol=2e-3, rtol=0)
    torch.testing.assert_close(inner.std(dim=(0, 2, 3)), torch.ones(channels), atol=2e-3, rtol=0)


def test_the_order_of_digits_is_the_split_that_it_always_was():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundle, digits = load_digits(), load("digits")
    train, test = train_test_split(range(len(bundle.target)), test_size=0.2, stratify=bundle.target, random_state=0)
    for rows, inputs, labels in (
        (train, digits.train_inputs, digits.train_labels),
        (test, digits.test_inputs, digits.test_labels),
    ):
        assert labels.tolist() == bundle.target[rows].tolist()
        shown = inputs[:, 0] * 0.3760 + 0.3053
        torch.testing.assert_close(shown, torch.from_numpy(bundle.images[rows]).float() / 16, atol=1e-6, rtol=0)


def test_digits_without_scikit_learn_are_refused_with_the_way_to_get_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingExtraError, match=r"expunge\[bench\]"):
        load("digits")
    assert not is_there("digits")
