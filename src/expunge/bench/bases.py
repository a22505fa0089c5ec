"""Base models: pre-trained once on texts of nobody's, and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge.core.vectors import Snapshot
from expunge.data.tokens import UNCOUNTED
from expunge.federation.keeping.checkpoint import load_snapshot, save_snapshot

WARM_UP = 0.05
"""In this share of the steps the rate rises; then it falls as half a cosine does."""


@dataclass(frozen=True)
class Pretraining:
    """How a base is trained: so many steps of AdamW, each on so many rows of every text."""

    steps: int
    batch_size: int
    learning_rate: float


def pretrained(
    model: nn.Module,
    texts: Sequence[tuple[Tensor, Tensor]],
    how: Pretraining,
    seed: int,
    determined: Sequence[Any],
    folder: Path,
) -> nn.Module:
    """The model, trained now or before.

    Args:
        model: with its initial weights; trained in place.
        texts: each with as many rows in every batch.
        how: steps, batches and rate.
        seed: of the batches.
        determined: what else the model comes from, for its name in the folder.
        folder: where bases are kept.
    """
    content = [*determined, dataclasses.asdict(how), seed]
    file = folder / f"{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}.safetensors"
    if file.exists():
        load_snapshot(model, file).write_to(model)
        return model
    pretrain(model, texts, how, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_snapshot(Snapshot.of(model), model, file)
    return model


def pretrain(model: nn.Module, texts: Sequence[tuple[Tensor, Tensor]], how: Pretraining, seed: int) -> None:
    """Train it in place on rows drawn from every text, the mean loss of those tokens that count."""
    device = next(model.parameters()).device
    texts = [(inputs.to(device), after.to(device)) for inputs, after in texts]
    chance = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=how.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step / how.steps))
    model.train()
    for _ in range(how.steps):
        drawn = [torch.randint(len(inputs), (how.batch_size,), generator=chance).to(device) for inputs, _ in texts]
        inputs, after = (
            torch.cat([own[part][rows] for own, rows in zip(texts, drawn, strict=True)]) for part in (0, 1)
        )
        optimiser.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), after.flatten(), ignore_index=UNCOUNTED)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    model.eval()


def _rate(done: float) -> float:
    if done < WARM_UP:
        return (done + 1e-3) / (WARM_UP + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))
