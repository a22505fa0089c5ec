"""One model that comes to be judged and those beside it, asked the same questions; and what rows are called.

The questions are drawn when the model is fixed; the trained and the retrained models answer the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from expunge.auditing.measured import Measured
from expunge.auditing.measures import Compared
from expunge.auditing.verdict import Verdict
from expunge.bench.evaluation import Evaluation
from expunge.bench.results import Row

HONEST = "retrain"
BESIDE = "retrain-beside-"
"""With a number: an honest retrain beside fewer retrained models."""

FEWER = (3, 5, 8)
"""Retrained models that an honest retrain is judged beside, besides all."""

MIXED = (5, 10, 15, 20, 30, 50)
"""Percent of the trained weights, along the curve of mixtures."""

BEST = "best-of-five"
"""How the row of several attempts begins."""


@dataclass(frozen=True)
class Heard:
    """A row with its verdict, the values that it came from, and the how many-th attempt it was."""

    row: Row
    compared: Sequence[Compared]
    attempt: int = 1


@dataclass(frozen=True, eq=False)
class Hearing:
    """One candidate and those that it is judged beside, asked the same questions."""

    evaluation: Evaluation
    own: Measured
    trained: Measured
    references: Sequence[Measured]
    sharing: Sequence[Measured] = ()

    def heard(self, name: str, count: int | None = None, attempt: int = 1) -> Heard:
        """The verdict beside the first so many references, or beside all; and those of the trained model's start."""
        references, exam = self.references[:count], self.evaluation.exam
        beside = [*references, *self.sharing]
        judgement = exam.judgement(self.own, self.trained, beside, attempt)
        row = self.evaluation.row(name, self.own, self.trained, references)
        told = dataclasses.replace(row, verdict=judgement.verdict.value)
        known = exam.compared(self.own, self.trained, beside) if judgement.findings or judgement.refused else ()
        return Heard(told, known, attempt)


def best(rows: Sequence[Row]) -> Row:
    """The one that its maker would show: EQUIVALENT before UNDECIDED before all else, the first where several are.

    Example:
        >>> rows = [Row("attempt", n, verdict=v) for n, v in enumerate(["DAMAGED", "UNDECIDED", "EQUIVALENT"])]
        >>> best(rows).verdict, best(rows[:2]).verdict
        ('EQUIVALENT', 'UNDECIDED')
    """
    return max(rows, key=lambda row: (row.verdict == Verdict.EQUIVALENT, row.verdict == Verdict.UNDECIDED))
