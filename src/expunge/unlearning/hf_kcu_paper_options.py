"""The options of the printed update, and what it costs at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expunge.errors import RequestError
from expunge.federation.messages.tasks import FORWARD_COST, PRODUCT_COST
from expunge.unlearning.checks import refuse_idle, require_choice, require_flag, require_number, require_whole
from expunge.unlearning.estimate import Estimate, Size, small_change
from expunge.unlearning.recovery import Recovery

CausalWeights = Literal["gradient-norm", "uniform", "none"]


@dataclass(frozen=True)
class HfKcuPaperOptions:
    """What the paper's own tables vary.

    Attributes:
        iterations: k of conjugate gradient.
        damping: lambda.
        beta: the step is capped at beta ||theta||; None is "without adaptive scaling".
        causal_weights: ``gradient-norm`` as printed; ``uniform`` is 1/N for everybody ("uniform influence"); ``none``
            is "without causal weighting": one step with everyone's Hessian, which every client applies.
        influence_decay: False leaves conjugate gradient out: ``v = g / lambda``.
        recovery: a round of the clients that stay afterwards, or None.
    """

    iterations: int = 10
    damping: float = 0.01
    beta: float | None = 0.01
    causal_weights: CausalWeights = "gradient-norm"
    influence_decay: bool = True
    recovery: Recovery | None = None

    def __post_init__(self) -> None:
        require_choice(self, "causal_weights", CausalWeights)
        require_whole(self, "iterations")
        require_number(self, "damping")
        require_number(self, "beta", may_be_none=True)
        require_flag(self, "influence_decay")
        if not self.influence_decay:
            if self.damping == 0:
                raise RequestError("Without damping there is no unfiltered influence: give a damping above 0.")
            refuse_idle(self, ("iterations",), "without influence decay nothing is solved")

    @property
    def expected_rounds(self) -> int:
        """Message rounds, but for batch-norm statistics."""
        solved = self.iterations if self.causal_weights == "none" and self.influence_decay else 0
        return 1 + solved + (2 if self.recovery else 0)


def estimate(options: HfKcuPaperOptions, size: Size) -> Estimate:
    """What it costs at most: k products with each owner's own data, or with everyone's."""
    solved = options.iterations * PRODUCT_COST * (size.samples + size.forgotten) if options.influence_decay else 0.0
    work = size.forgotten + solved
    if options.recovery is not None:
        judged = len(options.recovery.lengths) * FORWARD_COST * max(size.samples, size.validation)
        work += options.recovery.epochs * size.samples + judged
    renewed = int(size.statistics)  # batch norm's, from those who stay
    work += renewed * FORWARD_COST * size.samples
    everyone, messages = size.clients + size.owners, options.expected_rounds + renewed
    sent = (messages * size.vector + small_change(messages)) * everyone
    return Estimate(messages, 2 * sent, sent, work)
