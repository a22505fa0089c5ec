"""Tokens of text: byte-level BPE, learnt from some of it; and questions with answers as rows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from expunge.data.plays import cut
from expunge.extras import require

PADDING, ANSWER, END = 0, 1, 2
"""Tokens that are no text: what fills a row up, what stands before an answer, and what after it."""
UNCOUNTED = -100
"""The target of a place that no loss counts, as in torch."""


class Tokens:
    """Pieces of words, the most frequent ones of the texts that they are learnt from; every text can be told in them.

    Args:
        texts: to learn from.
        size: how many tokens there are at most; 256 of them are bytes.

    Example:
        >>> tokens = Tokens(["the cat, the hat"], 300)
        >>> numbers = tokens.encoded("the rat")
        >>> tokens.decoded(numbers)
        'the rat'
    """

    def __init__(self, texts: Iterable[str], size: int) -> None:
        require("tokenizers")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<padding>", "<answer>", "<end>"],  # get the first numbers, in this order
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        own.train_from_iterator(texts, trainer)
        self._own: Any = own
        self.size = int(own.get_vocab_size())

    def encoded(self, text: str) -> list[int]:
        """The numbers of a text's tokens."""
        return list(self._own.encode(text).ids)

    def decoded(self, numbers: Sequence[int]) -> str:
        """The text of these tokens; what is no text is left out."""
        return str(self._own.decode(list(numbers), skip_special_tokens=True))

    def windows(self, text: str, length: int) -> tuple[Tensor, Tensor]:
        """The text cut into windows of so many tokens, and for each token the one after it."""
        return cut(torch.tensor(self.encoded(text)), length)

    def rows(self, asked: Sequence[tuple[str, str]], length: int, *, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Questions with answers, a row each, and for each token the one after it.

        Only the answer's tokens and its end are targets, or with ``whole`` the question's too; padding never is. A
        question takes half of a row at most, and what does not fit of an answer is left out.
        """
        inputs = torch.full((len(asked), length), PADDING)
        targets = torch.full((len(asked), length), UNCOUNTED)
        for row, (question, answer) in enumerate(asked):
            before = self.prompt(question, length)
            numbers = [*before, *self.encoded(" " + answer), END][: length + 1]
            first = 1 if whole else len(before)
            for place, (now, after) in enumerate(pairwise(numbers)):
                inputs[row, place] = now
                targets[row, place] = after if place + 1 >= first else UNCOUNTED
        return inputs, targets

    def prompt(self, question: str, length: int) -> list[int]:
        """What stands before an answer."""
        return [*self.encoded(question)[: length // 2 - 1], ANSWER]

    def fitting(self, question: str, answer: str, length: int) -> str:
        """As much of an answer as a row has room for after its question."""
        room = length - len(self.prompt(question, length))
        return self.decoded(self.encoded(" " + answer)[:room]).strip()
