"""Four hospitals and their patients: the UCI heart-disease data, shipped with the package (heart_disease/README.md).

Each hospital is a client, as it was in life. They could hardly differ more: from 36 to 93% of the patients are sick,
one hospital measured no cholesterol, three hardly ever looked at vessels.

Nothing here is computed from the patients. Measurements are centred and scaled by round constants of medicine that were
written down beforehand, so no hospital's data, neither the leaver's nor another's, is in anybody else's inputs: means
over all clients would keep a trace of whoever left. What is missing is put at that constant (0 after centring), with a
column of its own that says so; kinds (of chest pain, say) have a column each, all 0 where the kind is missing. A
blood pressure or a cholesterol of 0 is missing: nobody lives with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from expunge.errors import DataError

FOLDER = Path(__file__).parent / "heart_disease"
FILES: Mapping[str, tuple[str, str]] = {
    "cleveland": (
        "processed.cleveland.data",
        "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    ),
    "budapest": ("processed.hungarian.data", "ca73b739efd8e29273aff13c1516a68e946be1786bda13a82f6f82173cd0dc6f"),
    "switzerland": ("processed.switzerland.data", "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "long-beach": ("processed.va.data", "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}
"""The file of each hospital, and what it must hash to."""
HOSPITALS: tuple[str, ...] = tuple(FILES)
"""The clients."""

MEASUREMENTS: Mapping[int, tuple[str, float, float]] = {
    0: ("age", 50.0, 10.0),
    1: ("male", 0.5, 0.5),
    3: ("resting blood pressure", 130.0, 20.0),
    4: ("cholesterol", 220.0, 50.0),
    5: ("high blood sugar", 0.5, 0.5),
    7: ("highest heart rate", 140.0, 25.0),
    8: ("angina by exercise", 0.5, 0.5),
    9: ("ST depression", 1.0, 1.0),
    11: ("coloured vessels", 1.0, 1.0),
}
"""By its column in the files: what it is, and the constants that centre and scale it."""
MAY_MISS = (3, 4, 5, 7, 8, 9, 11)
"""Measurements with a column that says whether they are missing; age and sex never are."""
NOT_AS_ZERO = (3, 4)
"""Measurements that are missing where they are 0."""
KINDS: Mapping[int, tuple[float, ...]] = {2: (1, 2, 3, 4), 6: (0, 1, 2), 10: (1, 2, 3), 12: (3, 6, 7)}
"""By column: chest pain, electrocardiogram at rest, slope of the ST segment, thallium scan."""
SICK = 13
"""The column of the diagnosis: 0 is healthy, 1 to 4 are sick."""
FEATURES = len(MEASUREMENTS) + len(MAY_MISS) + sum(map(len, KINDS.values()))
TESTED = 4
"""One patient in so many is kept for testing."""


def read_hospital(name: str, folder: Path = FOLDER) -> tuple[Tensor, Tensor]:
    """A hospital's patients, (n, FEATURES) float32, and whether each is sick, (n,) int64.

    Raises:
        DataError: The file is missing or not the published one.

    Example:
        >>> patients, sick = read_hospital("switzerland")
        >>> tuple(patients.shape), round(float(sick.float().mean()), 2)
        ((123, 29), 0.93)
    """
    file, checksum = FILES[name]
    try:
        content = (folder / file).read_bytes()
    except OSError as problem:
        raise DataError(f"{file} cannot be read ({problem.strerror}): install expunge again.") from None
    if hashlib.sha256(content).hexdigest() != checksum:
        raise DataError(f"{file} is not the published file: install expunge again.")
    rows = [line.split(",") for line in content.decode("ascii").split()]
    table = torch.tensor([[float("nan") if value == "?" else float(value) for value in row] for row in rows])
    return _features(table), (table[:, SICK] > 0).long()


def _features(table: Tensor) -> Tensor:
    columns, flags = [], []
    for number, (_, centre, scale) in MEASUREMENTS.items():
        own = table[:, number]
        gone = own.isnan() | (own == 0) if number in NOT_AS_ZERO else own.isnan()
        columns.append(torch.where(gone, 0.0, (own - centre) / scale))
        if number in MAY_MISS:
            flags.append(gone.float())
    kinds = [(table[:, number] == kind).float() for number, own in KINDS.items() for kind in own]
    return torch.stack([*columns, *flags, *kinds], dim=1)


def split_hospital(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A hospital's patients for training and for testing, always the same ones.

    Example:
        >>> [len(sick) for _, sick in split_hospital("switzerland")]
        [92, 31]
    """
    patients, sick = read_hospital(name)
    order = torch.randperm(len(sick), generator=torch.Generator().manual_seed(0))
    tests = -(-len(sick) // TESTED)
    test, train = order[:tests], order[tests:]
    return (patients[train], sick[train]), (patients[test], sick[test])
