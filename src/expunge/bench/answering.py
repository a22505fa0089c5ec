"""How well a language model answers questions, as TOFU measures it (Maini et al., 2024).

    probability   ``P(a | q)^(1/|a|)``: the geometric mean of the probabilities of an answer's tokens
    ROUGE-L       how much of the right answer's words are, in their order, in what the model says (recall)
    truth ratio   mean of the wrong answers' probability over that of the right one in other words

A truth ratio near 1 or above is that of a model which does not know; who knows is well below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expunge.data.tokens import END, PADDING, UNCOUNTED, Tokens

AT_ONCE = 256
"""Rows that go through the model together."""


@torch.no_grad()
def probabilities(module: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Of each row's targets, those that count: the geometric mean of their probabilities."""
    found = []
    for inputs, targets in zip(*(torch.split(part, AT_ONCE) for part in rows), strict=True):
        losses = F.cross_entropy(
            module(inputs).transpose(1, 2), targets, ignore_index=UNCOUNTED, reduction="none"
        ).double()
        found.append(torch.exp(-losses.sum(dim=1) / (targets != UNCOUNTED).sum(dim=1)))
    return torch.cat(found)


def truth_ratios(paraphrased: Tensor, wrong: Tensor) -> Tensor:
    """A question's wrong answers (a row of them) over its paraphrased one, by their probabilities.

    Example:
        >>> truth_ratios(torch.tensor([0.5]), torch.tensor([[0.1, 0.3]]))
        tensor([0.4000])
    """
    return wrong.mean(dim=1) / paraphrased


@torch.no_grad()
def said(module: nn.Module, prompts: Sequence[Sequence[int]], length: int, device: str) -> list[list[int]]:
    """What the model says after each prompt: the likeliest token each time, until it ends or the row is full."""
    rows = torch.full((len(prompts), length), PADDING)
    for row, prompt in enumerate(prompts):
        rows[row, : len(prompt)] = torch.tensor(prompt)
    rows, every = rows.to(device), torch.arange(len(prompts), device=device)
    place = torch.tensor([len(prompt) for prompt in prompts], device=device)
    going = place < length
    while bool(going.any()):
        # A token sees none after it, so what a row is filled up with is never seen.
        shown = rows[:, : int(place.max())]
        logits = torch.cat(
            [
                module(part)[every[: len(part)], at]
                for part, at in zip(torch.split(shown, AT_ONCE), torch.split(place - 1, AT_ONCE), strict=True)
            ]
        )
        chosen = logits.argmax(dim=1)
        going = going & (chosen != END)
        rows[every[going], place[going]] = chosen[going]
        place = place + going
        going = going & (place < length)
    ends = place.tolist()
    return [rows[row, len(prompt) : ends[row]].tolist() for row, prompt in enumerate(prompts)]


def answered(module: nn.Module, tokens: Tokens, questions: Sequence[str], length: int, device: str) -> list[str]:
    """What the model answers."""
    prompts = [tokens.prompt(question, length) for question in questions]
    return [tokens.decoded(numbers).strip() for numbers in said(module, prompts, length, device)]


def rouge_recall(right: str, answer: str) -> float:
    """ROUGE-L's recall: the longest common subsequence of words, over the words of the right answer; not stemmed.

    Example:
        >>> rouge_recall("The cat sat on the mat.", "a cat on a mat")
        0.5
    """
    wanted, given = (re.findall(r"[a-z0-9]+", text.lower()) for text in (right, answer))
    best = [0] * (len(given) + 1)
    for word in wanted:
        before = 0  # the entry up and to the left, which the row overwrites as it goes
        for place, other in enumerate(given, start=1):
            above = best[place]
            best[place] = before + 1 if word == other else max(above, best[place - 1])
            before = above
    return best[-1] / len(wanted) if wanted else 0.0
