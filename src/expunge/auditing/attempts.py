"""How often a request was audited: whoever may ask again until it fits passes by chance.

The record is a JSON file. It counts different models of one request, and one model that is asked with another nonce.
The same model with the same nonce gets the same questions, and is not counted again. Weights that answer otherwise,
since the code around them has changed, are another model.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from expunge.auditing.model_audit import Asked
from expunge.errors import DataError
from expunge.federation.keeping.durable import DurableFolder
from expunge.federation.keeping.files import read_json, write_whole

RECORD = "audits.json"
"""Its name in a run's folder."""


def samples_digest(samples: tuple[Tensor, Tensor]) -> str:
    """What names a request in the record: SHA-256 of the forgotten samples and their labels.

    Example:
        >>> import torch
        >>> samples_digest((torch.zeros(2, 1), torch.tensor([0, 1])))[:8]
        '14b266fb'
    """
    found = hashlib.sha256()
    for part in samples:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def model_digest(weights: str, answers: Tensor) -> str:
    """What names a model in the record: the digest of its weights, and of what it answers, to a hundredth.

    Args:
        weights: the digest of the weights.
        answers: class scores for the forgotten samples.
    """
    chances = answers.detach().double().softmax(dim=1).mul(100).round().cpu().numpy()
    return hashlib.sha256(weights.encode() + chances.tobytes()).hexdigest()


def asked_now(record: str | Path | None, request: str, model: str, nonce: str | None = None) -> Asked:
    """How a model is asked: with the nonce that is given, the one that it was asked with before, or a new one.

    Args:
        record: the file of earlier audits, which is added to; None counts nothing.
        request: digest of what was to be forgotten.
        model: what names the model.
        nonce: the auditor's, or None.

    Raises:
        DataError: the file is no record of audits.
        RequestError: another audit holds the record, or its folder cannot be written.
    """
    if record is None:
        return Asked(nonce or secrets.token_hex(8))
    path = Path(record)
    with DurableFolder(path.parent, path.name).alone(patience=10.0):  # two audits at once are two attempts
        known = _known(path)
        own = known.setdefault(request, [])
        for number, entry in enumerate(own, start=1):
            if entry["model"] == model and nonce in (None, entry["nonce"]):
                return Asked(entry["nonce"], number, counted=True)
        chosen = nonce or secrets.token_hex(8)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        own.append({"model": model, "nonce": chosen, "date": now})
        write_whole(path, json.dumps(known, indent=2) + "\n")
    return Asked(chosen, len(own), counted=True)


def asked_before(record: str | Path, request: str, model: str) -> Asked | None:
    """How a model was asked last, which counts nothing; None where no audit has asked it.

    Raises:
        DataError: the file is no record of audits.
    """
    asked = None
    for number, entry in enumerate(_known(Path(record)).get(request, []), start=1):
        if entry["model"] == model:
            asked = Asked(entry["nonce"], number, counted=True)
    return asked


def _known(path: Path) -> dict[str, list[dict[str, Any]]]:
    if not path.exists():
        return {}
    content = read_json(path)
    try:
        return {
            str(request): [{part: str(entry[part]) for part in ("model", "nonce", "date")} for entry in entries]
            for request, entries in content.items()
        }
    except (AttributeError, KeyError, TypeError) as problem:
        raise DataError(f"{path} is no record of audits: choose another file, or remove it.") from problem
