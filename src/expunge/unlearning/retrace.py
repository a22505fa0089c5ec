"""Retrace: the pull of a client, kept while training or replayed, is retraced and taken back.

While training the server adds up one vector per client, ``A_u`` (federation/keeping/memory.py). To first order,
training without u would have ended at ``theta - f(G_r) A_u``: each round's pull is missing, worn down by what the
others trained afterwards, kept in directions that are flat for G_r, gone in curved ones. So

    theta' = theta - t f(G_r) A_u,        then a repair by those who stay (repair.py)

with G_r the Gauss-Newton matrix of the clients that stay, and f the training's own response to a pull, run on a
quadratic: optimisers, schedules, server momentum, absent clients are in it (training/response.py). `retrace` takes G_r
apart layer by layer into Kronecker factors (K-FAC): one message, and f is exact; a long step, and any of a model of one
layer, or with few factors, is filtered anew by products half way (half_way.py, one_layer.py). `retrace-krylov` sees it
through k products, a message each. Where no vector was kept, as of samples whose client stays, the owners replay a few
rounds (pulls.py).

Where it fails: it is first order in the pull, and the curvature of the end stands for that of the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from expunge.core.kronecker import Filter, KroneckerCurvature
from expunge.core.krylov import conjugate_gradient
from expunge.core.preconditioner import sketched
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError, RequestError
from expunge.federation.engines.engine import Cost, Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.recipe import SGD, Adam, FedAvg, Measured
from expunge.federation.training.response import Response
from expunge.unlearning.answers import Answer, answered
from expunge.unlearning.at_work import at_work, is_adapted, is_at_work, told
from expunge.unlearning.doubts import FLAT, doubts, far, worn
from expunge.unlearning.estimate import FURTHER, LOUD, MANY, STRETCHES
from expunge.unlearning.filters import damped
from expunge.unlearning.followed import SOON, followed, gradient_samples
from expunge.unlearning.half_way import FARTHEST, ByProducts, half_way
from expunge.unlearning.lazily import Lazily
from expunge.unlearning.one_layer import by_exact_curvature
from expunge.unlearning.options import StepOptions
from expunge.unlearning.preparation import (
    away_warnings,
    forgotten_memory,
    memory_warnings,
    prepared,
    require_reachable,
    require_single_replies,
)
from expunge.unlearning.pulls import Apply, Pull, Replay, recorded
from expunge.unlearning.rates import with_measured_rates
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.repair import ADAPTIVE_PART, Calibration, Correction, RecoveryRound, Repair, ShortRound
from expunge.unlearning.request import Parties, Request
from expunge.unlearning.retained import BATCH_SIZE, Retained, has_statistics
from expunge.unlearning.retrace_options import RetraceKrylovOptions, RetraceOptions, estimate, estimate_krylov
from expunge.unlearning.trust_region import GENTLE, Bounds, Following, Taken, shortened, take, unsafe

Step = Callable[[Apply], Tensor]
"""What is subtracted from the model, given how functions of the curvature are applied."""

HALF_WAY = "half-way"
"""The filter by exact curvature half way, which is tried first."""

FOLLOWED = "followed"
"""The response followed by gradients, which is tried before it."""

STIFFER = 4.0
"""The gentler step takes those who stay for so many times as fast at correcting."""

DAMPED = (
    "The damped filter left half to nearly all of a client in small networks, the training's own response half of it: "
    "choose filter='response', or method='retrace', which left least."
)
"""What retrace-krylov says where the response is known and was not chosen."""

FEW = 0.1
"""Nobody is asked how they answer where more than this share of the weights has a diagonal for its curvature: what the
response takes for worn down is then too little to tell by."""


@dataclass(frozen=True, eq=False)
class _Ready:
    """What is known once nothing can be refused any more."""

    state: ServerState
    parties: Parties
    stay: Retained
    recovery: Mapping[str, Repair]
    pull: Callable[[Engine], Pull]

    def following(self, repairs: Callable[[Snapshot], Mapping[str, Repair]], *, may_cost_more: bool) -> Following:
        """What follows the step: those who stay keep their vectors, without those who leave."""
        return Following(self.state.model, lambda: forgotten_memory(self.state, self.parties), repairs, may_cost_more)

    def outcome(
        self, taken: Taken, cost: Cost, tau: float | None, details: Mapping[str, Any], momentum: Tensor | None = None
    ) -> Outcome:
        """What was done, or that no length of the step was safe."""
        memory, step = self.state.memory, {**details.get("solves", {}), **taken.record}
        if memory is not None and not self.parties.partly and set(self.parties.leaving) <= set(memory.clients):
            norms = memory.norms(self.parties.leaving)
            step = {"contributions": dict(zip(self.parties.leaving, norms, strict=True)), **step}
        told: dict[str, Any] = {"curvature_samples": self.stay.samples}
        told |= {name: value for name, value in details.items() if name != "solves"}
        told |= {"steps": [step], **taken.repairs}
        if taken.length is None:
            return unsafe("retrace", self.state, cost, told)
        left = taken.memory.bound_to(taken.model, momentum) if taken.memory is not None else None
        warnings = (*away_warnings(self.state, self.parties), *shortened(taken, tau))
        warnings += memory_warnings(self.parties, left)
        # Of a squared error, where clients have one rate: Adam's differ from weight to weight.
        one_rate = isinstance(self.state.trained_by.client, SGD)
        is_exact = one_rate and _is_one_layer(self.state.model) and taken.record["filter"] != HALF_WAY
        warnings += () if is_exact else far(self.state.model, taken)
        return Outcome("retrace", self.state.moved(taken.model, left), cost, details=told, warnings=warnings)


def retrace(engine: Engine, state: ServerState, request: Request, options: RetraceOptions) -> Outcome:
    """Forget by the kept or replayed pull, filtered layer by layer, a long step by products half way; and repaired.

    Args:
        engine: reaches the clients that stay; leaving ones need not be there where their vectors were kept.
        state: the trained model with its schedule and memory; it is left untouched.
        request: what is to be forgotten.
        options: filter, trust region, what follows.
    """
    ready = _ready(engine, state, request, options)
    if state.memory is not None and is_at_work(state):
        ready = replace(ready, stay=at_work(ready.stay, state.memory))
    before = engine.cost.sample_gradients
    with measured(engine) as cost:
        pull = ready.pull(engine)
        curvature = ready.stay.factors(state.model)
        pull = with_measured_rates(engine, state, ready.parties, pull, curvature, options.seed)
        found = _answer(ready, pull, curvature, options)
        stiffness = found.stiffness if found is not None else 1.0
        curvature, answer = curvature.stiffer(max(stiffness, 1.0)), min(stiffness, 1.0)
        reach = 1.0 + _further(state, pull, ready.parties) if curvature.layers > 1 else 1.0
        spread = found.spread if found is not None else 0.0
        filters = _steps(pull, options.filter, options.damping, answer, spread)
        made: dict[str, Callable[[], Tensor]] = {
            kind: partial(_scaled, reach, step, curvature.apply) for kind, step in filters.items()
        }
        first = cache(partial(pull.left, curvature.apply, spread=spread))  # looked at for its length, then mostly taken
        made |= {"response": lambda: reach * first()} if "response" in made else {}
        nearer, said = _nearer(ready, pull, curvature, options, reach, first)
        steps = Lazily({**nearer, **made})
        expected = Lazily({name: partial(_expected, steps, name, curvature) for name in steps})
        corrects = pull.response is not None and options.may_correct
        long = bool(nearer) and not _is_one_layer(state.model)
        mended = _corrections(ready, curvature, pull, options, before, long=long) if corrects else None
        repairs = mended if mended is not None else lambda _: ready.recovery
        following = ready.following(repairs, may_cost_more=corrects or bool(ready.recovery))
        bounds = Bounds(options.tau, options.lengths, expected)
        taken = take(ready.stay, state.model, steps, bounds, following)
        momentum = _momentum(state, pull, curvature.apply, taken)
    by_products = taken.record["filter"] in (HALF_WAY, FOLLOWED)
    reach = 1.0 if by_products else reach
    details = {"source": pull.source, "solver": "kronecker", "damping": _cut_off(pull, options), "reach": reach}
    details |= {"layers": curvature.layers, **({} if found is None else {"stiffness": stiffness})}
    outcome = ready.outcome(taken, cost, options.tau, details, momentum)
    adaptive = isinstance(state.trained_by.client, Adam) and _is_one_layer(state.model)
    doubted = doubts(state.model, curvature, found, by_products=by_products, adaptive=adaptive)
    asked_nobody = pull.response is not None and not pull.response.recipe.client.adaptive and curvature.layers > 1
    doubted += worn(pull, first()) if asked_nobody else ()
    doubted = doubted if outcome.succeeded else ()
    return replace(outcome, warnings=(*outcome.warnings, *pull.notes, *curvature.notes, *doubted, *said))


def retrace_krylov(engine: Engine, state: ServerState, request: Request, options: RetraceKrylovOptions) -> Outcome:
    """Forget by the kept or replayed pull, filtered through k products of the retained curvature.

    Args: as those of ``retrace``.
    """
    if isinstance(state.trained_by.client, Measured):
        raise RequestError("Only retrace measures an optimiser: choose method='retrace', or hf-kcu.")
    ready, solves = _ready(engine, state, request, options), dict[str, Any]()
    with measured(engine) as cost:
        pull = ready.pull(engine)
        felt, ask = list[bool](), ready.stay.product(state.model)

        def product(vectors: Tensor) -> Tensor:
            found = ask(vectors)
            felt.append(bool(found.any()))
            return found

        def apply(function: Filter, vectors: Tensor) -> Tensor:
            return ByProducts.of(product, vectors, options.iterations).apply(function, vectors)

        if options.filter == "none":
            step = pull.total
        elif options.filter == "response":
            step = pull.left(apply)
        else:
            step, solves = _by_conjugate_gradient(product, pull, options)
        repairs_more = bool(ready.recovery) and options.filter != "none"
        following = ready.following(lambda _: ready.recovery, may_cost_more=repairs_more)
        bounds = Bounds(options.tau, options.lengths)
        taken = take(ready.stay, state.model, {options.filter: step}, bounds, following)
        momentum = _momentum(state, pull, apply, taken)
    details = {"source": pull.source, "solver": "krylov", "damping": _cut_off(pull, options), "solves": solves}
    outcome = ready.outcome(taken, cost, options.tau, details, momentum)
    by_default = options.filter == "damped" and options.damping is None and not _is_one_layer(state.model)
    said = {FLAT: bool(felt) and not any(felt), DAMPED: by_default and pull.response is not None}
    doubted = tuple(sentence for sentence, holds in said.items() if holds)
    doubted += worn(pull, step) if options.filter == "response" and not _is_one_layer(state.model) else ()
    doubted = doubted if outcome.succeeded else ()
    return replace(outcome, warnings=(*outcome.warnings, *pull.notes, *doubted))


def _is_one_layer(model: Snapshot) -> bool:
    return model.layout is not None and model.layout.is_one_layer


def _scaled(reach: float, step: Step, apply: Apply) -> Tensor:
    return reach * step(apply)


def _expected(steps: Mapping[str, Tensor], kind: str, curvature: KroneckerCurvature) -> float:
    """What a step costs those who stay, by its own curvature."""
    return curvature.quadratic(steps[kind]) / 2


def _steps(pull: Pull, kind: str, damping: float | None, answer: float = 1.0, spread: float = 0.0) -> dict[str, Step]:
    """What is subtracted at length 1, by the filter's name, the sharper first; refused before anybody is asked."""
    if kind == "damped" or (kind == "auto" and (pull.response is None or damping is not None)):
        left = damped(damping, pull.response)
        return {"damped": lambda apply: apply(left, pull.total)}
    if pull.response is None:
        raise RequestError("The training's response needs its learning rate, local steps and rounds.")
    wanted = {"answered": answer} if answer < 1 else {}
    wanted |= {"response": 1.0, **({GENTLE: STIFFER} if kind == "auto" else {})}
    return {name: partial(pull.left, stiffer=stiffer, spread=spread) for name, stiffer in wanted.items()}


def _nearer(
    ready: _Ready,
    pull: Pull,
    curvature: KroneckerCurvature,
    options: RetraceOptions,
    reach: float,
    first: Callable[[], Tensor],
) -> tuple[dict[str, Callable[[], Tensor]], tuple[str, ...]]:
    """What is tried before the factors' steps: the response followed by gradients, else exact curvature half way."""
    own = _by_gradients(ready, pull, curvature, options, first)
    if own is not None:
        return {FOLLOWED: lambda: own}, ()
    exact, said = _half_way(ready, pull, curvature, options, reach, first)
    return ({HALF_WAY: lambda: exact} if exact is not None else {}), said


def _half_way(
    ready: _Ready,
    pull: Pull,
    curvature: KroneckerCurvature,
    options: RetraceOptions,
    reach: float,
    first: Callable[[], Tensor],
) -> tuple[Tensor | None, tuple[str, ...]]:
    """The step by exact curvature half way: of a model of one layer, or of a network where `_may_be_halved`.

    With it, or without, what is to be said: where products cannot be right, the factors are taken alone.
    """
    state, response = ready.state, pull.response
    # Batch-norm statistics of the middle are nobody's.
    if response is None or not options.may_look_half_way or has_statistics(state.model):
        return None, ()
    trained = response.steps * (state.schedule.batch_size if state.schedule is not None else BATCH_SIZE)
    try:
        if _is_one_layer(state.model):
            return by_exact_curvature(ready.stay, state.model, pull, curvature, first(), trained), ()
        if not _may_be_halved(state, response, curvature, options, reach, first):
            return None, ()
        return pull.left(half_way(ready.stay, state.model, pull, curvature, first(), trained).apply), ()
    except NumericalError as problem:
        return None, (f"Curvature half way was not used, and the step is one by factors alone: {problem}",)


def _by_gradients(
    ready: _Ready, pull: Pull, curvature: KroneckerCurvature, options: RetraceOptions, first: Callable[[], Tensor]
) -> Tensor | None:
    """The step that follows the response by gradients, where that can be done and those who stay lose less by it.

    That is asked on samples that did not choose it, beside the factors' own step.
    """
    state, response = ready.state, pull.response
    if response is None or not options.may_look_half_way or has_statistics(state.model) or is_adapted(state):
        return None
    if not _has_one_rate(response) or curvature.layers < 2 or curvature.without_factors > MANY:
        return None
    if len(response.rounds) > STRETCHES:
        return None
    if not is_long(state.model, state.model.moved(state.model.parameters - first()), SOON * options.long_step_ratio):
        return None
    trained = response.steps * (state.schedule.batch_size if state.schedule is not None else BATCH_SIZE)
    looking = ready.stay.looking_at(gradient_samples(ready.stay.samples, trained))
    step = followed(looking, state.model, pull, curvature)
    if step is None:
        return None
    own, others = (ready.stay.losses(state.model, each, (0.0, 1.0)).rises[1] for each in (step, first()))
    return step if own <= others else None


def _has_one_rate(response: Response) -> bool:
    """Whether clients have one rate, and the server averages."""
    return not response.recipe.client.adaptive and isinstance(response.recipe.server, FedAvg)


def _may_be_halved(
    state: ServerState,
    response: Response,
    curvature: KroneckerCurvature,
    options: RetraceOptions,
    reach: float,
    first: Callable[[], Tensor],
) -> bool:
    """Whether a network's step is long, its clients have one rate and the server averages; or it has few factors."""
    if curvature.without_factors > MANY:
        return not is_adapted(state)
    # Over tokens the exact curvature along the pull is asked for.
    if not _has_one_rate(response) or curvature.layers < 2 or curvature.over_tokens:
        return False
    ended = [state.model.moved(state.model.parameters - times * first()) for times in (reach, 1.0)]
    return is_long(state.model, ended[0], options.long_step_ratio) and not is_long(state.model, ended[1], FARTHEST)


def _answer(ready: _Ready, pull: Pull, curvature: KroneckerCurvature, options: RetraceOptions) -> Answer | None:
    """How many times the curvature of the layers one by one those who stay have: asked for, or by an exact product."""
    state, adapted = ready.state, is_adapted(ready.state)
    factored = curvature.layers > 1 and curvature.without_factors < FEW
    if options.coupled == "auto" and factored and not adapted and _may_ask(ready, pull, options):
        return answered(ready.stay, state, pull, curvature)
    if options.coupled is True or (options.coupled == "auto" and (curvature.over_tokens or adapted)):
        product = ready.stay.product(state.model)(pull.total)
        return told(curvature, pull.total, product) if adapted else Answer(curvature.coupling(pull.total, product))
    return None


def _may_ask(ready: _Ready, pull: Pull, options: RetraceOptions) -> bool:
    """Whether those who stay may be asked how they answer a displaced model: under Adam, where they train at all."""
    if pull.response is None or not isinstance(pull.response.recipe.client, Adam):
        return False
    # A client's own local training is no sum, and would bring batch-norm statistics of its own.
    alone = not ready.stay.engine.sums_only and not has_statistics(ready.state.model)
    return alone and options.filter == "auto" and options.damping is None and options.may_correct


def _cut_off(pull: Pull, options: StepOptions) -> float | None:
    """The damping that is given, or the curvature at which the training's response falls off; None if not known."""
    if options.damping is not None or pull.response is None:
        return options.damping
    return 1.0 / pull.response.travel()


def _further(state: ServerState, pull: Pull, parties: Parties) -> float:
    """How much longer than predicted the step is, where a client has pulled louder than others.

    Of a boosted pull more is left in a network of several layers than the response tells (docs/method.md), of a clean
    client's it is not, and in a linear model the response is right.
    """
    if pull.source != "recorded" or state.memory is None:
        return 0.0
    return FURTHER * min(max((state.memory.loudness(parties.leaving) - 1.0) / (LOUD - 1.0), 0.0), 1.0)


def _momentum(state: ServerState, pull: Pull, apply: Apply, taken: Taken) -> Tensor | None:
    """The server's momentum without what it holds of the pull; None where its rule has none."""
    held = state.memory.server_momentum if state.memory is not None else None
    if held is None or pull.response is None or taken.length is None:
        return held
    return held - pull.held(apply).to(held)


def is_long(remembers: Snapshot, model: Snapshot, ratio: float) -> bool:
    """Whether the step between the two is longer than this share of the model's own length.

    Example:
        >>> start = Snapshot(torch.tensor([3.0, 4.0]), {})
        >>> [is_long(start, start.moved(start.parameters + torch.tensor([0.0, step])), 0.1) for step in (0.4, 0.6)]
        [False, True]
    """
    step, whole = (torch.linalg.vector_norm(v) for v in (model.parameters - remembers.parameters, remembers.parameters))
    return bool(step > ratio * whole)


def _ready(engine: Engine, state: ServerState, request: Request, options: StepOptions) -> _Ready:
    """Everything that can be refused is refused here, before any work."""
    parties = prepared(engine, state, request, leave_out=options.missing == "leave-out")
    pull = _source(state, parties, options)
    recovery = options.recovery
    repairs = {"recovery": RecoveryRound(recovery.plan(state), recovery.lengths)} if recovery is not None else {}
    asks = recovery is not None or isinstance(pull, Replay) or isinstance(state.trained_by.client, Measured)
    require_single_replies(engine, state, asks_for_them=asks)
    stay = Retained.of(engine, state, parties)
    stay = replace(stay, samples=options.samples(sum(stay.left.values())), seed=options.seed)
    if isinstance(pull, Replay):
        return _Ready(state, parties, stay, repairs, pull)
    kept, kind = pull, getattr(options, "filter", "auto")
    if kind != "none":
        _steps(kept, kind, options.damping)
    return _Ready(state, parties, stay, repairs, lambda _: kept)


def _source(state: ServerState, parties: Parties, options: StepOptions) -> Pull | Replay:
    """Vectors of everybody who leaves, where they were kept; else a replay by those who hold the data."""
    wanted = getattr(options, "source", "auto")
    remembered = state.memory.clients if state.memory is not None else ()
    kept = not parties.partly and (state.checkpoints is None or set(parties.leaving) <= set(remembered))
    if wanted == "recorded" or (wanted == "auto" and kept):
        if parties.partly:
            raise RequestError("Samples whose client stays have no vector of their own: choose source='replay'.")
        return recorded(state, parties.leaving)
    replay = Replay(state, parties, options.seed)
    replay.require_followed()
    if state.checkpoints is None:
        raise RequestError(
            "Samples whose client stays have no vector of their own, and there are no checkpoints to replay from: "
            "use hf-kcu."
        )
    require_reachable(parties)
    replay.require_possible()
    return replay


def _corrections(
    ready: _Ready,
    curvature: KroneckerCurvature,
    pull: Pull,
    options: RetraceOptions,
    before: float,
    *,
    long: bool,
) -> Callable[[Snapshot], Mapping[str, Repair]]:
    """A correction, and after a long step a short round before it and a calibration after; by where it ended.

    ``before`` is what the engine had spent before the request; ``long`` says that a step is a long one wherever it
    ends.
    """
    tau = 0.0 if options.tau is None else options.tau
    assert pull.response is not None
    correction: dict[str, Repair] = {
        "correction": Correction(curvature, pull.response, tau, options.correction_lengths)
    }
    engine, state, response = ready.stay.engine, ready.state, pull.response
    part = ADAPTIVE_PART if response.recipe.client.adaptive else 1.0

    def repairs(model: Snapshot) -> Mapping[str, Repair]:
        if not long and not is_long(state.model, model, options.long_step_ratio):
            return correction
        short = ShortRound.of(state, response, options.round_lengths, engine.cost.sample_gradients - before)
        # A client's own local training is no sum, and would bring batch-norm statistics of its own.
        can_train = short is not None and not engine.sums_only and not has_statistics(model)
        first: dict[str, Repair] = {"short_round": short} if short is not None and can_train else {}
        has_last = curvature.layers > 1 and curvature.last(model.parameters) is not None
        return first | correction | ({"calibration": Calibration(curvature, part)} if has_last else {})

    return repairs


def _by_conjugate_gradient(
    product: Callable[[Tensor], Tensor], pull: Pull, options: RetraceKrylovOptions
) -> tuple[Tensor, dict[str, Any]]:
    """``lambda (G + lambda)^-1 A``: the damped filter through products."""
    damping = options.damping
    if damping is None:
        if pull.response is None:
            damped(None)  # refused
        assert pull.response is not None
        damping = 1.0 / pull.response.travel()
    right_side = damping * pull.total
    solution = conjugate_gradient(
        product,
        right_side,
        iterations=options.iterations,
        damping=damping,
        tolerance=options.tolerance,
        start=pull.total,  # only the curved part has to be found, and it stays defined at lambda = 0
        preconditioner=sketched(product, right_side, damping, rank=options.preconditioner_rank, seed=options.seed),
    )
    return solution.vector, {"solves": {"server": solution.diagnosis()}}


register(
    Method(
        "retrace",
        retrace,
        RetraceOptions(),
        "our default: the pull kept while training or replayed, filtered layer by layer, taken back, repaired",
        needs="vectors",
        estimate=estimate,
    ),
    recovery=True,
)
register(
    Method(
        "retrace-krylov",
        retrace_krylov,
        RetraceKrylovOptions(),
        "the same pull, filtered through Krylov products; a message each",
        needs="vectors",
        estimate=estimate_krylov,
    ),
    recovery=True,
)
register(
    Method(
        "unfiltered+recovery",
        retrace_krylov,
        RetraceKrylovOptions(filter="none", tau=0.5, recovery=Recovery()),
        "a control: the pull kept while training, unfiltered; then a recovery round",
        needs="vectors",
        estimate=estimate_krylov,
    )
)
