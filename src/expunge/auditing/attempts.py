"""How often a request was audited: whoever may ask again until it fits passes by chance.

The record is a JSON file. It counts different models of one request, one model that is asked with another nonce or
about other unseen samples or triggers, and one that stands without a retrained model that it stood beside before: who
may choose among these passes by chance as well. The same model with the same nonce gets the same questions, and is not
counted again, nor where more retrained models came. Weights that answer otherwise, since the code around them has
changed, are another model. A request is its samples, in whatever order; with one sample more it is another one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expunge.auditing.model_audit import Asked
from expunge.auditing.sample_doubts import rows
from expunge.core.vectors import tensors_digest
from expunge.errors import DataError, RequestError
from expunge.federation.keeping.durable import DurableFolder
from expunge.federation.keeping.files import read_json, write_whole

RECORD = "audits.json"
"""Its name in a run's folder."""


def samples_digest(samples: tuple[Tensor, Tensor]) -> str:
    """What names a request in the record: SHA-256 of the forgotten samples with their labels, in any order.

    Example:
        >>> import torch
        >>> one = torch.arange(2.0)[:, None], torch.tensor([0, 1])
        >>> samples_digest(one) == samples_digest(tuple(part.flip(0) for part in one))
        True
    """
    inputs, labels = (rows(part) for part in samples)
    pairs = sorted(hashlib.sha256(one + own).digest() for one, own in zip(inputs, labels, strict=True))
    kinds = " ".join(f"{part.dtype} {tuple(part.shape)}" for part in samples)
    return hashlib.sha256(kinds.encode() + b"".join(pairs)).hexdigest()


def setting_digest(*parts: Tensor | int | None) -> str:
    """What names that from which a nonce draws questions: unseen samples as they lie, and stamped ones."""
    tensors = [torch.as_tensor(-1 if part is None else part) for part in parts]
    return tensors_digest((str(number), own) for number, own in enumerate(tensors))


def model_digest(weights: str, answers: Tensor) -> str:
    """What names a model in the record: the digest of its weights, and of what it answers, to a hundredth.

    Args:
        weights: the digest of the weights.
        answers: class scores for the forgotten and the unseen samples.
    """
    chances = answers.detach().double().softmax(dim=1).mul(100).round().cpu().numpy()
    return hashlib.sha256(weights.encode() + chances.tobytes()).hexdigest()


def asked_now(
    record: str | Path | None,
    request: str,
    model: str,
    nonce: str | None = None,
    setting: str = "",
    beside: Iterable[str] = (),
) -> Asked:
    """How a model is asked: with the nonce that is given, the one that it was asked with before, or a new one.

    Args:
        record: the file of earlier audits, which is added to; None counts nothing.
        request: digest of what was to be forgotten.
        model: what names the model.
        nonce: the auditor's, or None.
        setting: what names the questions; empty where these follow from the request.
        beside: digests of the retrained models.

    Raises:
        DataError: the file is no record of audits.
        RequestError: another audit holds the record, its folder cannot be written, or the nonce is no text.
    """
    if nonce is not None and not (isinstance(nonce, str) and nonce):
        raise RequestError(f"A nonce is a text that the model's maker does not know, not {nonce!r}.")
    if record is None:
        return Asked(nonce or secrets.token_hex(8))
    path = Path(record)
    with DurableFolder(path.parent, path.name).alone(patience=10.0):  # two audits at once are two attempts
        known = _known(path)
        own = known.setdefault(request, [])
        models = sorted(set(beside))
        for number, entry in enumerate(own, start=1):
            if entry["model"] != model or nonce not in (None, entry["nonce"]):
                continue
            if entry.get("setting", setting) == setting and set(entry.get("beside", ())) <= set(models):
                if entry.get("beside", []) != models:
                    entry |= {"setting": setting, "beside": models}  # from now on these belong to it
                    write_whole(path, json.dumps(known, indent=2) + "\n")
                return Asked(entry["nonce"], number, counted=True)
        is_known = any(entry["nonce"] == nonce for entries in known.values() for entry in entries)
        chosen = nonce or secrets.token_hex(8)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        own.append({"model": model, "nonce": chosen, "date": now, "setting": setting, "beside": models})
        write_whole(path, json.dumps(known, indent=2) + "\n")
    return Asked(chosen, len(own), counted=True, is_known=is_known)


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
        return {str(request): [_entry(entry) for entry in entries] for request, entries in content.items()}
    except (AttributeError, KeyError, TypeError) as problem:
        raise DataError(f"{path} is no record of audits: choose another file, or remove it.") from problem


def _entry(given: Any) -> dict[str, Any]:
    """As it was written; earlier versions wrote neither the setting nor the retrained models."""
    entry: dict[str, Any] = {part: str(given[part]) for part in ("model", "nonce", "date")}
    if "setting" in given:
        entry |= {"setting": str(given["setting"]), "beside": [str(own) for own in given["beside"]]}
    return entry
