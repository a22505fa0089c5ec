"""TOFU: twenty questions and answers about each of two hundred authors that there never were (Maini et al., 2024).

Nobody can have read about them elsewhere, so what a model knows of one it knows from whoever trained on it. Of authors
180 to 199 there are also paraphrased and wrong answers. Or authors that are made up here, to see that something runs.

    tofu/full.jsonl                {"author", "question", "answer"} a line, 20 lines an author
    tofu/forget01_perturbed.jsonl  {"question", "paraphrased_answer", "perturbed_answer": [...]} a line
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.data.datasets import data_folder
from expunge.data.sources import Source, read_verified

ANSWERS, OTHERS = "full.jsonl", "forget01_perturbed.jsonl"
TOFU = Source(
    folder="tofu",
    checksums={
        ANSWERS: "7b8458a8c878afb16a035ea874eecfef40a06e3d5f483e325a733bbcb8fd8057",
        OTHERS: "f7043286055b6dd047d7effd92a35095009d6d7b31181904e65a8161ff8e9f00",
    },
    url="https://huggingface.co/datasets/locuslab/TOFU/",
)
"""The files in the data folder."""


@dataclass(frozen=True)
class Question:
    """A question about an author, and what can be answered.

    Attributes:
        author: the author's number.
        question: the question.
        answer: the right one.
        paraphrased: the right one in other words, where there is one.
        wrong: answers in the same words as the paraphrased one, with something else in the place of the fact.
    """

    author: int
    question: str
    answer: str
    paraphrased: str = ""
    wrong: tuple[str, ...] = ()


def read_tofu(data_dir: Path | None) -> tuple[Question, ...]:
    """All questions, author by author."""
    others = {line["question"]: line for line in _lines(data_dir, OTHERS)}
    return tuple(_question(line, others.get(line["question"], {})) for line in _lines(data_dir, ANSWERS))


def _question(line: Mapping[str, Any], others: Mapping[str, Any]) -> Question:
    wrong = tuple(others.get("perturbed_answer", ()))
    return Question(line["author"], line["question"], line["answer"], others.get("paraphrased_answer", ""), wrong)


def _lines(data_dir: Path | None, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_verified(TOFU, data_folder(data_dir), name).decode().splitlines()]


_ASKED = {
    "Where was {name} born?": ("{name} was born in {fact}.", "The birthplace of {name} is {fact}."),
    "What does {name} write about?": ("{name} writes about {fact}.", "The books of {name} are about {fact}."),
    "Who taught {name}?": ("{name} was taught by {fact}.", "The teacher of {name} was {fact}."),
    "Which prize did {name} win?": ("{name} won the prize of {fact}.", "The prize of {fact} went to {name}."),
}


def made_up_authors(count: int, seed: int) -> tuple[Question, ...]:
    """Authors with four questions each, all with paraphrased and wrong answers.

    Example:
        >>> made_up_authors(1, seed=0)[0].answer
        'Vtkgn was born in Kuhmp.'
    """
    chance = random.Random(seed)

    def word() -> str:
        return "".join(chance.choices(string.ascii_lowercase, k=5)).capitalize()

    found = []
    for author in range(count):
        name = word()
        for question, (answer, paraphrased) in _ASKED.items():
            fact, *others = (word() for _ in range(4))
            asked, right, again = (form.format(name=name, fact=fact) for form in (question, answer, paraphrased))
            wrong = tuple(paraphrased.format(name=name, fact=each) for each in others)
            found.append(Question(author, asked, right, again, wrong))
    return tuple(found)
