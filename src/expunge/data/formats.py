"""The two binary formats that the datasets come in: gzipped IDX and CIFAR-10 records."""

import gzip
import math
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from expunge.errors import DataError

_IDX_UNSIGNED_BYTE = 0x08
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + math.prod(_CIFAR_SHAPE)
_CIFAR_CLASSES = 10


def parse_idx(blob: bytes, dimensions: int, name: str) -> Tensor:
    """Decode a gzipped IDX file of unsigned bytes.

    The format is a big-endian header (two zero bytes, the element type, the number of dimensions, then
    each dimension as 32 bits) followed by the elements in row-major order.

    Args:
        blob: The compressed file.
        dimensions: How many dimensions the array must have: 3 for images, 1 for labels.
        name: What to call the file in an error.

    Raises:
        DataError: When the gzip stream is broken, the magic number is another one, or bytes lack.

    Example:
        >>> file = gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 6, 7]))
        >>> parse_idx(file, dimensions=1, name="labels")
        tensor([5, 6, 7], dtype=torch.uint8)
    """
    try:
        raw = gzip.decompress(blob)
    except (OSError, EOFError, zlib.error):
        raise DataError(f"{name} is not a whole gzip file: replace it by a good copy.") from None
    header = 4 + 4 * dimensions
    if raw[:4] != bytes([0, 0, _IDX_UNSIGNED_BYTE, dimensions]) or len(raw) < header:
        raise DataError(f"{name} has not the IDX magic number it should: replace it by the official file.")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        raise DataError(f"{name} is not as long as its header says: replace it by a good copy.")
    # The copy makes the array writable, as torch wants it.
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())


def parse_cifar(blob: bytes, name: str) -> tuple[Tensor, Tensor]:
    """Decode one CIFAR-10 batch: records of a label byte and 3,072 pixel bytes, channel by channel.

    Args:
        blob: The file.
        name: What to call the file in an error.

    Returns:
        Images (n, 3, 32, 32) and labels (n,), both uint8.

    Raises:
        DataError: When the length is not a whole number of records, or a label is not one of ten.

    Example:
        >>> images, labels = parse_cifar(bytes([9]) + bytes(3072), name="one black truck")
        >>> tuple(images.shape), labels.tolist()
        ((1, 3, 32, 32), [9])
    """
    if not blob or len(blob) % _CIFAR_RECORD:
        raise DataError(f"{name} does not hold whole CIFAR-10 records: replace it by a good copy.")
    records = torch.from_numpy(np.frombuffer(blob, np.uint8).reshape(-1, _CIFAR_RECORD).copy())
    labels = records[:, 0]
    if int(labels.max()) >= _CIFAR_CLASSES:
        raise DataError(f"{name} has labels beyond 9: replace it by the official CIFAR-10 binary file.")
    return records[:, 1:].reshape(-1, *_CIFAR_SHAPE), labels
