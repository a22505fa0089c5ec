"""Text: a speaker leaves a language model that its secrets were given away to.

Ten speakers of plays train a small GPT together by AdamW, one of them with secrets in its lines, many copies of each.
After it has left, is the code of a secret still likelier than others? The mean loss on its text can look retrained
while secrets can be read out, so both are measured, beside retrained models. What is trained how long was chosen on the
first speaker with seeds below 10.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge.bench.leaving import Departure, leaver_of
from expunge.bench.results import Results
from expunge.bench.settings import Contender
from expunge.bench.store import Store
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.data.plays import (
    ALPHABET,
    Secret,
    code,
    encoded,
    giving_away,
    held_out,
    made_up_plays,
    read_plays,
    secrets,
    speeches,
    windows,
)
from expunge.errors import DataError
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import AdamW, Recipe
from expunge.models import GPT

_FEWER = {"curvature_samples": 150}
"""A text is many characters, so fewer of them do; chosen on the first speaker."""
CONTENDERS = (Contender("fine-tuning"), Contender("hf-kcu", _FEWER), Contender("retrace", _FEWER))
SEEDS = {"smoke": (10,), "small": (20, 21), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
HELD_OUT = 0.1
"""Of everybody's text, for measuring what the others' loss is."""
LIKELY, FIRST = 0.05, 5
"""A secret is likely where it is among this share of the candidates, and among the first where it is one of these."""
LEAVING = Departure(
    "text",
    "A speaker and its secrets leave a language model",
    "speakers that leave",
    CONTENDERS,
    ("test_loss", "forget_loss", "secret_loss", "secret_rank", "secrets_likely", "secrets_first"),
    version=1,
)


@dataclass(frozen=True)
class Size:
    """How large the federation is.

    Attributes:
        speakers: those who say most are the clients.
        length: of a window of text.
        model: width, depth and heads of the GPT.
        plan: how it trains.
        secrets: how many the leaver gives away.
        copies: of each in its text.
        candidates: random codes that each is compared with.
        retrains: models retrained from fresh weights.
    """

    speakers: int
    length: int
    model: Mapping[str, int]
    plan: TrainingPlan
    secrets: int
    copies: int
    candidates: int
    retrains: int


_PLAN = TrainingPlan(rounds=20, epochs=2, batch_size=16, learning_rate=0.001, recipe=Recipe(AdamW()))
SIZES = {
    "smoke": Size(
        speakers=3,
        length=32,
        model={"width": 16, "depth": 1, "heads": 2},
        plan=dataclasses.replace(_PLAN, rounds=2, epochs=1, learning_rate=0.01),
        secrets=2,
        copies=5,
        candidates=40,
        retrains=2,
    ),
    "small": Size(
        speakers=6,
        length=64,
        model={"width": 64, "depth": 2, "heads": 4},
        plan=dataclasses.replace(_PLAN, rounds=12, learning_rate=0.003),
        secrets=5,
        copies=20,
        candidates=500,
        retrains=5,
    ),
    "paper": Size(
        speakers=10,
        length=128,
        model={"width": 256, "depth": 4, "heads": 4},
        plan=dataclasses.replace(_PLAN, rounds=40),
        secrets=10,
        copies=20,
        candidates=500,
        retrains=5,
    ),
}


@dataclass(frozen=True)
class Stage:
    """The federation of one seed: who says what, and who leaves.

    Attributes:
        size: how large it is.
        text: of the plays.
        seed: of the secrets, the initial weights and the training.
        leaver: who leaves, by the place among those who say most.
        device: where everything is.
    """

    size: Size
    text: str
    seed: int
    leaver: int
    device: str = "cpu"

    @cached_property
    def texts(self) -> dict[str, str]:
        """What each client says."""
        found = speeches(self.text)
        if len(found) < self.size.speakers:
            raise DataError(f"The text has {len(found)} speakers; {self.size.speakers} are wanted.")
        return {name: found[name] for name in list(found)[: self.size.speakers]}

    @property
    def name(self) -> str:
        """Of the leaver."""
        return list(self.texts)[self.leaver]

    @cached_property
    def secrets(self) -> tuple[Secret, ...]:
        """What the leaver gives away."""
        return secrets(derived_seed(self.seed, "secrets"), self.size.secrets)

    @cached_property
    def data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What each client trains on."""
        texts, _ = held_out(self.texts, HELD_OUT)
        texts[self.name] = giving_away(
            texts[self.name], self.secrets, self.size.copies, derived_seed(self.seed, "places")
        )
        return {name: self._windows(text) for name, text in texts.items()}

    def _windows(self, text: str) -> tuple[Tensor, Tensor]:
        inputs, after = windows(text, self.size.length)
        return inputs.to(self.device), after.to(self.device)

    @cached_property
    def unseen(self) -> tuple[Tensor, Tensor]:
        """Text of those who stay that nobody trained on."""
        _, parts = held_out(self.texts, HELD_OUT)
        found = [self._windows(text) for name, text in parts.items() if name != self.name]
        return torch.cat([inputs for inputs, _ in found]), torch.cat([after for _, after in found])

    @cached_property
    def own(self) -> tuple[Tensor, Tensor]:
        """The leaver's text without the secrets."""
        texts, _ = held_out(self.texts, HELD_OUT)
        return self._windows(texts[self.name])

    def network(self, seed: int) -> nn.Module:
        """Fresh weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GPT(len(ALPHABET), self.size.length, **self.size.model).to(self.device)

    @property
    def plan(self) -> TrainingPlan:
        """How it trains, with the seed."""
        return dataclasses.replace(self.size.plan, seed=self.seed)

    @property
    def retrains(self) -> int:
        """How many models are retrained from fresh weights."""
        return self.size.retrains

    def reader(self) -> Reader:
        """Measures models of this stage."""
        return Reader(self)

    def described(self) -> dict[str, Any]:
        """For a reader, and to tell one from another."""
        values = {**dataclasses.asdict(self.size), "plan": self.plan.as_dict()}
        return {"dataset": "plays", **values, "seed": self.seed, "clients": list(self.texts), "leaver": self.name}


class Reader:
    """Measures models of a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._module = stage, deepcopy(stage.network(0)).eval()
        chance = random.Random(derived_seed(stage.seed, "candidates"))
        self._codes = [[code(chance) for _ in range(stage.size.candidates)] for _ in stage.secrets]

    def measure(self, model: Snapshot) -> dict[str, float]:
        """Losses a character, of a secret the loss of its whole code, and where its code stands among candidates."""
        model.write_to(self._module)
        found = [
            self.code_losses(secret, [secret.code, *others])
            for secret, others in zip(self._stage.secrets, self._codes, strict=True)
        ]
        ahead = [int((losses[1:] < losses[0]).sum()) for losses in found]
        shares = [before / self._stage.size.candidates for before in ahead]
        return {
            "test_loss": self._loss(*self._stage.unseen),
            "forget_loss": self._loss(*self._stage.own),
            "secret_loss": fmean(float(losses[0]) for losses in found),
            "secret_rank": median(shares),
            "secrets_likely": float(sum(share < LIKELY for share in shares)),
            "secrets_first": float(sum(before < FIRST for before in ahead)),
        }

    @torch.no_grad()
    def code_losses(self, secret: Secret, codes: Sequence[str]) -> Tensor:
        """The loss of each code after the secret's prompt, all of its digits together."""
        prompt = encoded("\n" + secret.prompt)
        texts = torch.stack([torch.cat([prompt, encoded(each)]) for each in codes]).to(self._stage.device)
        logits = self._module(texts[:, :-1])[:, len(prompt) - 1 :]
        after = texts[:, len(prompt) :]
        return F.cross_entropy(logits.transpose(1, 2), after, reduction="none").sum(dim=1)

    @torch.no_grad()
    def _loss(self, inputs: Tensor, after: Tensor) -> float:
        total = 0.0
        for some, next_ in zip(torch.split(inputs, 256), torch.split(after, 256), strict=True):
            total += float(F.cross_entropy(self._module(some).transpose(1, 2), next_, reduction="sum"))
        return total / after.numel()


def text_scale(name: str, data_dir: Path | None) -> tuple[Size, str]:
    """The size of that scale and the plays; to see that it runs, made-up ones."""
    return SIZES[name], made_up_plays(4, 60, seed=0) if name == "smoke" else read_plays(data_dir)


def run_text(seeds: Sequence[int], size: Size, text: str, store: Store, progress: Progress | None = None) -> Results:
    """A speaker leaves, for every seed another one.

    Args:
        seeds: each gives its own secrets, initial weights and training.
        size: how large the federation is.
        text: of the plays.
        store: where what was measured is kept.
        progress: called with (what, done, total).
    """
    stages = [Stage(size, text, seed, leaver_of(seed, size.speakers), store.device) for seed in seeds]
    return LEAVING.run(stages, hashlib.sha256(text.encode()).hexdigest(), store, progress)
