"""Packed messages as Flower's records, and back.

Flower itself cuts every Array into chunks of 5 MiB, sends each as an object of its own and stores equal ones once
(flwr 1.41, ``Array.slice_array`` and ``push_objects``), so large models need no splitting here, and a model
that goes to ten sites is uploaded to the SuperLink once.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from expunge.errors import DataError
from expunge.federation.messages.wire import Packed, raw_bytes

NAME = "expunge"
"""Of the record that holds what is not a tensor."""

TENSORS = "expunge-tensors"
"""Of the record that holds the tensors."""

_RAW = "expunge.raw"  # Flower's own way, .npy files, has no bfloat16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def to_records(packed: Packed | None = None, **facts: str | int) -> RecordDict:
    """Records of a message and of facts beside it."""
    record = ConfigRecord(dict(facts))
    if packed is None:
        return RecordDict({NAME: record})
    record["message"] = json.dumps(packed.described)
    return RecordDict({NAME: record, TENSORS: to_arrays(dict(packed.tensors))})


def facts_of(records: RecordDict) -> dict[str, Any]:
    """The facts beside a message; DataError where the records are not ours."""
    record = records.get(NAME)
    if not isinstance(record, ConfigRecord):
        raise DataError("The message is not one of expunge's: look at what else uses its message types.")
    return dict(record)


def packed_of(records: RecordDict) -> Packed:
    """The message in the records; what it says is checked by ``wire.unpack``."""
    try:
        described = json.loads(facts_of(records).get("message", ""))
    except (TypeError, ValueError, RecursionError) as problem:
        raise DataError("A message cannot be read: it is not JSON.") from problem
    arrays = records.get(TENSORS)
    return Packed(to_tensors(arrays) if isinstance(arrays, ArrayRecord) else {}, described)


def payload_bytes(records: RecordDict) -> int:
    """Bytes of a message's tensors and texts, Flower's own envelope not counted."""
    total = 0
    for record in records.values():
        if isinstance(record, ArrayRecord):
            total += sum(len(array.data) for array in record.values())
        elif isinstance(record, ConfigRecord):
            total += sum(len(str(value)) for value in record.values())
    return total


def to_arrays(tensors: dict[str, Tensor]) -> ArrayRecord:
    """Tensors as raw bytes."""
    arrays = ArrayRecord()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES:
            raise DataError(f"Tensors of {dtype} cannot be sent: convert the model to one of {', '.join(_DTYPES)}.")
        arrays[name] = Array(dtype, tuple(tensor.shape), _RAW, raw_bytes(tensor))
    return arrays


def to_tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """The tensors; DataError where the bytes do not fill the shape."""
    tensors = {}
    for name, array in arrays.items():
        dtype = _DTYPES.get(array.dtype)
        sound = dtype is not None and array.stype == _RAW and min(array.shape, default=0) >= 0
        if dtype is None or not sound or len(array.data) != math.prod(array.shape) * dtype.itemsize:
            raise DataError(f"A message cannot be read: the bytes of its tensor {name!r} do not fit its shape.")
        empty = torch.empty(array.shape, dtype=dtype)
        tensors[name] = (
            torch.frombuffer(bytearray(array.data), dtype=torch.uint8).view(dtype).view(array.shape)
            if array.data
            else empty
        )
    return tensors
