import gzip

import pytest
import torch

from data.idx_files import idx
from expunge.data.formats import parse_cifar, parse_idx
from expunge.errors import DataError


def test_idx_round_trip() -> None:
    images = torch.randint(0, 256, (5, 4, 3), dtype=torch.uint8)
    assert torch.equal(parse_idx(idx(images), dimensions=3, name="images"), images)


IMAGES = torch.zeros(2, 3, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("blob", "sentence"),
    [
        pytest.param(idx(IMAGES)[:-9], "not a whole gzip file", id="truncated gzip"),
        pytest.param(b"", "magic number", id="empty file"),
        pytest.param(b"<html>not found</html>", "not a whole gzip file", id="a web page instead"),
        pytest.param(idx(IMAGES)[:12] + b"\xff" * 20, "not a whole gzip file", id="garbled deflate stream"),
        pytest.param(idx(IMAGES, kind=9), "magic number", id="signed bytes"),
        pytest.param(idx(IMAGES[0]), "magic number", id="two dimensions"),
        pytest.param(gzip.compress(bytes([0, 0, 8, 3, 0])), "magic number", id="header cut"),
        pytest.param(gzip.compress(gzip.decompress(idx(IMAGES))[:-1]), "as long as", id="a pixel short"),
        pytest.param(gzip.compress(gzip.decompress(idx(IMAGES)) + b"\0"), "as long as", id="a pixel more"),
    ],
)
def test_bad_idx_is_refused_with_its_name(blob: bytes, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        parse_idx(blob, dimensions=3, name="images.gz")
    assert str(caught.value).startswith("images.gz")


def test_cifar_records() -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    blob = b"".join(bytes([label]) + image.numpy().tobytes() for label, image in zip((3, 9), images, strict=True))
    parsed, labels = parse_cifar(blob, "batch")
    assert torch.equal(parsed, images)
    assert labels.tolist() == [3, 9]


@pytest.mark.parametrize("blob", [b"", bytes(3072), bytes(3073 + 1), bytes([10]) + bytes(3072)])
def test_bad_cifar_is_refused_with_its_name(blob: bytes) -> None:
    with pytest.raises(DataError, match=r"^batch\.bin "):
        parse_cifar(blob, "batch.bin")
