"""Authors, clients who know some of them, and adapters of a frozen language model that they fine-tune together.

The clients' authors are TOFU's last ones, the base has read of the first ones. What a model knows of whom is measured
as TOFU does (answering.py).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from expunge.auditing.membership import measure_attack
from expunge.bench.answering import answered, probabilities, rouge_recall, truth_ratios
from expunge.bench.bases import Pretraining, pretrained
from expunge.core.seeds import derived_seed
from expunge.core.vectors import Snapshot
from expunge.data.tofu import Question
from expunge.data.tokens import Tokens
from expunge.extras import require
from expunge.federation.training.plan import TrainingPlan
from expunge.models import GPT

HELD_OUT = 0.2
"""Of every author's questions: nobody trains on them, and membership is told against them."""
ADAPTED = r"blocks\.\d+\.(attention\.1\.project_(in|out)|mlp\.[13])"
"""The layers that get adapters: all linear ones of every block."""


@dataclass(frozen=True)
class Size:
    """How large the federation is.

    Attributes:
        clients: how many.
        authors: that each of them knows.
        known: so many first authors are in the base.
        length: of a row of tokens.
        tokens: how many different ones there are at most.
        model: width, depth and heads of the GPT.
        base: how it is pre-trained.
        rank: of the adapters, whose scale is twice that.
        plan: how they are fine-tuned.
        asked: questions of those who stay that are measured.
        retrains: adapters trained again from fresh ones.
    """

    clients: int
    authors: int
    known: int
    length: int
    tokens: int
    model: Mapping[str, int]
    base: Pretraining
    rank: int
    plan: TrainingPlan
    asked: int
    retrains: int


@dataclass(frozen=True)
class Library:
    """What there is to read: plays, and questions about authors."""

    plays: str
    questions: tuple[Question, ...]

    @cached_property
    def digest(self) -> str:
        """Of all of it."""
        return hashlib.sha256(repr((self.plays, self.questions)).encode()).hexdigest()


@dataclass(frozen=True)
class Stage:
    """The federation of one seed: who knows which authors, and who leaves.

    Attributes:
        size: how large it is.
        library: what there is to read.
        seed: of the base, of what is held out, of the adapters and the training.
        leaver: who leaves, by number.
        bases: the folder where pre-trained models are kept.
        device: where everything is.
    """

    size: Size
    library: Library
    seed: int
    leaver: int
    bases: Path
    device: str = "cpu"

    @cached_property
    def authors(self) -> dict[str, tuple[int, ...]]:
        """Whom each client knows: the last authors there are, dealt out one by one."""
        last = 1 + max(question.author for question in self.library.questions)
        first = last - self.size.clients * self.size.authors
        return {
            f"client-{number}": tuple(range(first + number, last, self.size.clients))
            for number in range(self.size.clients)
        }

    @property
    def name(self) -> str:
        """Of the leaver."""
        return list(self.authors)[self.leaver]

    @cached_property
    def unseen(self) -> frozenset[Question]:
        """Some questions about every author, which nobody trains on."""
        chance, found = random.Random(derived_seed(self.seed, "held out")), set[Question]()
        for author in (author for own in self.authors.values() for author in own):
            own = [question for question in self.library.questions if question.author == author]
            found |= set(chance.sample(own, round(HELD_OUT * len(own))))
        return frozenset(found)

    def questions(self, name: str, *, unseen: bool = False) -> list[Question]:
        """What a client trains on, or what is held out of its authors' questions."""
        about = [question for question in self.library.questions if question.author in self.authors[name]]
        return [question for question in about if (question in self.unseen) == unseen]

    @cached_property
    def tokens(self) -> Tokens:
        """Learnt from what the base reads: no client's questions."""
        before = [text for question in self._before for text in (question.question, question.answer)]
        return Tokens([self.library.plays, *before], self.size.tokens)

    @property
    def _before(self) -> list[Question]:
        return [question for question in self.library.questions if question.author < self.size.known]

    @cached_property
    def data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What each client trains on."""
        return {name: self.rows([(q.question, q.answer) for q in self.questions(name)]) for name in self.authors}

    def rows(self, asked: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        """Questions and answers as rows of tokens, and what comes after each."""
        inputs, after = self.tokens.rows(asked, self.size.length)
        return inputs.to(self.device), after.to(self.device)

    @cached_property
    def base(self) -> nn.Module:
        """The pre-trained model, made where it is not kept yet."""
        size, seed = self.size, derived_seed(self.seed, "base")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = GPT(self.tokens.size, size.length, **size.model).to(self.device)
        known = [(question.question, question.answer) for question in self._before]
        texts = [self.tokens.windows(self.library.plays, size.length), self.tokens.rows(known, size.length, whole=True)]
        determined = [self.library.digest, size.known, size.length, size.tokens, size.model, self.device]
        return pretrained(fresh, texts, size.base, seed, determined, self.bases)

    def network(self, seed: int) -> nn.Module:
        """The base with fresh adapters."""
        require("peft")
        from peft import LoraConfig, get_peft_model

        rank = self.size.rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            on_cpu: Any = copy.deepcopy(self.base).cpu()  # the same adapters on every device
            adapted: nn.Module = get_peft_model(on_cpu, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTED))
        return adapted.to(self.device)

    @property
    def plan(self) -> TrainingPlan:
        """How it trains, with the seed."""
        return dataclasses.replace(self.size.plan, seed=self.seed)

    @property
    def retrains(self) -> int:
        """How many times adapters are trained again from fresh ones."""
        return self.size.retrains

    def reader(self) -> Reader:
        """Measures models of this stage."""
        return Reader(self)

    def described(self) -> dict[str, Any]:
        """For a reader, and to tell one from another."""
        values = {**dataclasses.asdict(self.size), "plan": self.plan.as_dict(), "clients": self.authors}
        return {"dataset": "tofu", **values, "seed": self.seed, "leaver": self.name}


class Reader:
    """Measures models of a stage: what they know of the leaver's authors, and of the others'."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._module = stage, stage.network(0).eval()
        self._own, self._held_out = (stage.questions(stage.name, unseen=unseen) for unseen in (False, True))
        others = [question for name in stage.authors if name != stage.name for question in stage.questions(name)]
        chance = random.Random(derived_seed(stage.seed, "asked"))
        self._others = chance.sample(others, min(stage.size.asked, len(others)))
        told = [question for question in others if question.wrong]
        self._told = chance.sample(told, min(stage.size.asked, len(told)))

    def measure(self, model: Snapshot) -> dict[str, float]:
        """Means over questions; membership by the probabilities of answers that were and were not trained on."""
        model.write_to(self._module)
        own, held_out = (self._probabilities(asked) for asked in (self._own, self._held_out))
        return {
            "forget_probability": float(own.mean()),
            "forget_rouge": self._rouge(self._own),
            "forget_truth_ratio": self._truth_ratio(self._own),
            "others_probability": float(self._probabilities(self._others).mean()),
            "others_rouge": self._rouge(self._others),
            "others_truth_ratio": self._truth_ratio(self._told),
            "mia_auc": measure_attack(own.log(), held_out.log()).auc.value,
        }

    def _probabilities(self, asked: Sequence[Question]) -> Tensor:
        return self._of([(question.question, question.answer) for question in asked])

    def _of(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        return probabilities(self._module, self._stage.rows(pairs)).cpu()

    def _rouge(self, asked: Sequence[Question]) -> float:
        stage = self._stage
        said = answered(self._module, stage.tokens, [q.question for q in asked], stage.size.length, stage.device)
        right = [stage.tokens.fitting(question.question, question.answer, stage.size.length) for question in asked]
        return fmean(rouge_recall(*pair) for pair in zip(right, said, strict=True))

    def _truth_ratio(self, asked: Sequence[Question]) -> float:
        asked = [question for question in asked if question.wrong]
        paraphrased = self._of([(question.question, question.paraphrased) for question in asked])
        wrong = self._of([(question.question, answer) for question in asked for answer in question.wrong])
        return float(truth_ratios(paraphrased, wrong.view(len(asked), -1)).mean())
