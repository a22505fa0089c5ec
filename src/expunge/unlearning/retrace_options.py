"""The options of retrace and of retrace-krylov, and what they cost at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from expunge.federation.messages.tasks import FORWARD_COST, PRODUCT_COST
from expunge.unlearning.checks import (
    refuse_idle,
    require_choice,
    require_flag,
    require_number,
    require_rising,
    require_whole,
)
from expunge.unlearning.estimate import (
    FURTHER,
    STRETCHES,
    Estimate,
    Size,
    drawn,
    looked_at,
    recovered,
    renewing,
    searched,
    small_change,
)
from expunge.unlearning.followed import SOON, gradient_samples
from expunge.unlearning.half_way import PRODUCTS, samples
from expunge.unlearning.one_layer import CHECKED, PASSES
from expunge.unlearning.options import StepOptions
from expunge.unlearning.recovery import RECOVERY_LENGTHS
from expunge.unlearning.repair import CORRECTION_LENGTHS, LARGEST_PART, SCALES

FactoredFilter = Literal["auto", "response", "damped"]
KrylovFilter = Literal["damped", "response", "none"]
SourceOption = Literal["auto", "recorded", "replay"]


@dataclass(frozen=True)
class RetraceOptions(StepOptions):
    """Options of retrace.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: how many retained samples the curvature uses, spread by client size, and how many others the
            trust region looks at (a short round has its own, batch-norm statistics take whole batches); ``auto`` is
            all of them, but at most 1500; None is all.
        tau: how much the retained loss may rise in the end, in the loss's own unit; None takes the whole step, and
            nothing is corrected.
        lengths: step lengths that are tried, longest first.
        recovery: a whole round of the clients that stay afterwards, in place of a correction; or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
        source: where the pull is learnt: ``auto`` takes recorded vectors of everybody who leaves, else a replay;
            ``recorded`` or ``replay`` alone.
        filter: what is left of a pull along a direction of curvature e (filters.py): the training's own ``response``
            or ``damped``; ``auto`` is the response, before it a sharper one where those who stay say under Adam that
            they are less stiff, after it a gentler one where it costs them too much, and damped where a damping is
            given or nobody knows how the clients trained.
        correction: whether a correction of those who stay follows; after a long step a short round and a calibration
            (repair.py).
        correction_lengths: how far a correction may be taken, from 0 on.
        long_step_ratio: a step longer than this share of the model's own length is a long one; under SGD and FedAvg it
            is filtered anew by exact curvature half way (half_way.py). A model of one layer always is (one_layer.py),
            and one most of whose weights have no factors. From half of it on short trainings are followed by gradients
            first (followed.py).
        round_lengths: how far a short round may be taken, from 0 on.
        coupled: how what layers do together is looked at: ``auto`` asks some of those who stay, under Adam, how they
            answer a displaced model, or of adapters takes the exact curvature along the pull with its spread; else it
            takes the exact curvature along the pull for models with layers over tokens or steps, one message, and for
            others after a long step, and for models of one layer, exact curvature half way, fifteen or up to 32;
            ``True`` is always the exact curvature along
            the pull alone, ``False`` nothing.
    """

    source: SourceOption = "auto"
    filter: FactoredFilter = "auto"
    correction: bool = True
    correction_lengths: tuple[float, ...] = CORRECTION_LENGTHS
    long_step_ratio: float = 0.1
    round_lengths: tuple[float, ...] = RECOVERY_LENGTHS
    coupled: bool | Literal["auto"] = "auto"

    auto_samples: ClassVar[tuple[int, int, int]] = (1, 1, 1500)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "filter", FactoredFilter)
        require_choice(self, "source", SourceOption)
        require_flag(self, "correction")
        if self.coupled != "auto":
            require_flag(self, "coupled")
        require_rising(self, "correction_lengths", "round_lengths")
        if self.long_step_ratio != math.inf:  # nothing is a long step
            require_number(self, "long_step_ratio")
        if self.filter == "response":
            refuse_idle(self, ("damping",), "the training's response has none")
        if not self.may_correct:
            reason = "nothing is corrected without a correction, without tau, or beside a recovery"
            refuse_idle(self, ("correction_lengths", "round_lengths"), reason)
        if not self.may_correct and not self.may_look_half_way:
            refuse_idle(self, ("long_step_ratio",), "nothing is done otherwise after a long step")

    @property
    def may_correct(self) -> bool:
        """Whether a correction or a short round may follow, where the training's schedule is known."""
        return self.correction and self.tau is not None and self.recovery is None

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; with batch norm and under Adam it may be more."""
        searched = 3 if self.tau is not None else 0
        follows = 2 if self.recovery else 6 if self.may_correct else 0  # short round, correction, scales
        twice = self.filter == "auto" and self.tau is not None  # the sharper filter may be tried in vain
        again = follows + (1 if follows and not twice else 0) if searched else 0
        return 1 + bool(self.coupled) + searched + twice + follows + again + self.half_way_rounds + self.followed_rounds

    @property
    def half_way_rounds(self) -> int:
        """Of these, those of exact curvature half way: its products, and where it is tried in vain, what follows."""
        return CHECKED + PASSES * PRODUCTS + 7 if self.may_look_half_way else 0

    @property
    def followed_rounds(self) -> int:
        """Of these, those that follow the response by gradients, ask who stays, and where it is tried in vain."""
        return STRETCHES + 2 + 7 if self.may_look_half_way else 0

    @property
    def may_look_half_way(self) -> bool:
        """Whether a long step may be filtered by exact curvature half way: where something follows that repairs it."""
        repaired = self.tau is not None and (self.correction or self.recovery is not None)
        return self.filter == "auto" and self.damping is None and self.coupled == "auto" and repaired


@dataclass(frozen=True)
class RetraceKrylovOptions(StepOptions):
    """Options of retrace-krylov.

    Attributes:
        damping: lambda; None takes 1 / (learning rate x local steps in all) of the training.
        curvature_samples: as in retrace; ``auto`` is a tenth of the retained samples, but 100 to 1000.
        tau: how much the retained loss may rise, in the loss's own unit; None takes the whole step.
        lengths: step lengths that are tried, longest first.
        recovery: a round of the clients that stay afterwards, or None.
        missing: what to do when a client that stays cannot be reached: ``refuse`` or ``leave-out``.
        seed: of the samples drawn.
        filter: ``damped`` (by conjugate gradient), ``response`` (by Lanczos), or ``none``: the bare pull.
        iterations: k of conjugate gradient or Lanczos.
        tolerance: relative residual at which conjugate gradient may stop early.
        preconditioner_rank: products spent on a Nystrom sketch before conjugate gradient; 0 is none.
    """

    filter: KrylovFilter = "damped"
    iterations: int = 10
    tolerance: float = 0.0
    preconditioner_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self, "filter", KrylovFilter)
        require_whole(self, "iterations")
        require_whole(self, "preconditioner_rank", least=0)
        require_number(self, "tolerance")
        if self.filter != "damped":
            refuse_idle(self, ("tolerance", "preconditioner_rank"), "only the damped filter is a linear system")
        if self.filter == "response":
            refuse_idle(self, ("damping",), "the training's response has none")
        if self.filter == "none":
            refuse_idle(self, ("iterations", "damping"), "the pull is not filtered")

    @property
    def expected_rounds(self) -> int:
        """Message rounds that this takes at most; with batch norm it may be more."""
        solved = 0 if self.filter == "none" else 1 + self.iterations + bool(self.preconditioner_rank)
        searched = 3 if self.tau is not None else 0
        follows = 2 if self.recovery else 0
        again = follows + bool(follows) if searched else 0
        return solved + searched + follows + again


def estimate(options: RetraceOptions, size: Size) -> Estimate:
    """What it costs at most: factors once, losses on draws, and what follows; several filters may be tried."""
    sharper = size.asked and options.filter == "auto" and options.coupled == "auto" and options.may_correct
    replay = options.source == "replay" or (options.source == "auto" and not size.vectors)
    long = replay or (1 + FURTHER) * size.pull > options.long_step_ratio
    soon = replay or size.pull > SOON * options.long_step_ratio
    follows_it = options.may_look_half_way and size.half_way and size.short and not size.one_layer and soon
    halved = options.may_look_half_way and (size.always or (size.half_way and long))
    asked = CHECKED + PASSES * PRODUCTS if size.one_layer else PRODUCTS
    tries = 2 + sharper + (halved or follows_it) if options.tau is not None else 1
    work = drawn(options, size) + tries * (searched(options, size) + recovered(options, size))
    work += PRODUCT_COST * drawn(options, size) if options.coupled else 0
    if options.may_correct:
        gradient, short_round = drawn(options, size), size.samples * LARGEST_PART + size.clients
        scales = len(SCALES) + 4  # two slight ones of either model
        lengths = len(options.correction_lengths) + len(options.round_lengths) + scales
        work += tries * (gradient + short_round + lengths * FORWARD_COST * looked_at(options, size))
    follows = 2 if options.recovery else 4 if options.may_correct else 0
    renewed = renewing(options, size)
    measured = 2 if size.measured else 0  # rounds that tell how an optimiser answers
    work += size.measured
    messages, products, rows = options.expected_rounds + renewed + measured, bool(options.coupled), 0
    if halved:
        together = 1 if size.one_layer else size.rows
        looked = samples(options.samples(size.samples), math.inf, together)
        work += PRODUCT_COST * asked * together * (size.samples if looked is None else looked + size.clients)
        rows = asked * together
        messages -= options.half_way_rounds - (asked + 7)
    elif options.may_look_half_way:
        messages -= options.half_way_rounds
    messages -= 0 if follows_it else options.followed_rounds
    if follows_it:
        looked = gradient_samples(options.samples(size.samples), math.inf)
        work += STRETCHES * (size.samples if looked is None else looked + size.clients)
        work += 4 * FORWARD_COST * looked_at(options, size)
    messages += 7 if sharper else 0  # a filter more in vain: one length of it, and what follows
    sent = 1 + measured + products + 2 * tries + 2 * tries * follows + 2 * renewed + (rows + asked if halved else 0)
    gradients = STRETCHES if follows_it else 0
    down = (sent + gradients + 2 * 2 * bool(gradients)) * size.vector + small_change(messages)
    back = measured + products + tries * follows + renewed + rows + gradients
    up = size.factors + back * size.vector + small_change(messages)
    return _with_replay(Estimate(messages, down * size.clients, up * size.clients, work), size, replay)


def _with_replay(own: Estimate, size: Size, replay: bool) -> Estimate:
    """The same with what the owners' replay adds: two messages a checkpoint, each with a model there and back."""
    if not replay or not size.checkpoints:
        return own
    messages = 2 * size.checkpoints
    each = size.owners * (messages * size.vector + small_change(messages))
    work = own.sample_gradients + size.replayed
    return Estimate(own.messages + messages, own.bytes_down + each, own.bytes_up + each, work)


def estimate_krylov(options: RetraceKrylovOptions, size: Size) -> Estimate:
    """What it costs at most: k products and losses on draws, and what follows."""
    products = 0 if options.filter == "none" else 1 + options.iterations + options.preconditioner_rank
    rows = products * (size.rows if options.filter == "response" else 1)
    work = rows * PRODUCT_COST * drawn(options, size) + 2 * searched(options, size) + 2 * recovered(options, size)
    follows = 4 if options.recovery else 0
    renewed = renewing(options, size)
    messages = options.expected_rounds + renewed
    down = (3 + products + rows + 2 * follows + 2 * renewed) * size.vector + small_change(messages)
    up = (rows + follows + renewed) * size.vector + small_change(messages)
    own = Estimate(messages, down * size.clients, up * size.clients, work)
    return _with_replay(own, size, not size.vectors)
