"""The one way to forget: what expunge.forget, the command line and Flower share, and the function most users need."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from expunge.core.batch import Forward
from expunge.core.losses import CrossEntropy, Loss, PerSample, as_loss
from expunge.core.vectors import Chosen, Snapshot, named_as, shared_copy
from expunge.errors import DataError, ModelError, RequestError, listed
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.engines.fitting import require_fitting
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.local_data import Collate, Data
from expunge.federation.keeping.checkpoints import Checkpoints
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.unmoved import fit
from expunge.federation.messages.tasks import Draw, Gradient
from expunge.federation.training.plan import Schedule
from expunge.federation.training.recipe import Recipe, as_recipe
from expunge.progress import progress_bars, watch_rounds
from expunge.unlearning.auto import resolved
from expunge.unlearning.estimate import Estimate, Size
from expunge.unlearning.first_round import FirstRound
from expunge.unlearning.last_round import LastRound
from expunge.unlearning.learned import Learned
from expunge.unlearning.options import StepOptions
from expunge.unlearning.registry import AUTO, Method, Outcome
from expunge.unlearning.registry import method as registered
from expunge.unlearning.rehearsal import require_possible
from expunge.unlearning.request import Parties, Request

RECORDED_OTHERWISE = {"learning_rate": 1.1, "local_steps": 2.0}
"""By what factor a stated value may differ from the mean that was recorded; steps are counted in several ways."""

UNMOVED_ON_DISK = (
    "No round has moved {names}, and a forget moves what is trainable: name what is trained, "
    "Memory(model, parameters=..., folder=...), or freeze the rest before the training."
)

UNTRAINED = (
    "No site has trained {names}, and a forget moves what is trainable: audit the model, and before the next training "
    "set requires_grad=False on it wherever the model is made."
)

UNMOVED = 1e-5
"""Where no number of a parameter has changed by more than this part, nobody has trained it."""


WITHOUT_FACTORS = (
    "The loss {loss} has no Kronecker factors, so retrace-krylov runs. Nothing is corrected after its step, and of "
    "strong clients up to a third was left where that was measured: audit the model, or retrain."
)


@dataclass(frozen=True)
class DryRun:
    """What would be done, and about what it would cost at most; nothing was changed.

    Attributes:
        method: that would run.
        leaving: whole clients that would be forgotten.
        samples: how many samples of each client that stays would be.
        staying: who would be asked to help.
        asked_owners: whether those who leave are asked, too.
        estimate: messages, bytes and sample-gradients, at most; None where the method does not say.
        seconds: about so many, at most; None where it cannot be told.
        warnings: sentences for the person who asked.
    """

    method: str
    leaving: tuple[str, ...]
    samples: dict[str, int]
    staying: tuple[str, ...]
    asked_owners: bool
    estimate: Estimate | None
    seconds: float | None
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        what = [*self.leaving, *(f"{count} samples of {name}" for name, count in self.samples.items())]
        asked = f"asks {len(self.staying)} clients that stay" + (" and those who leave" if self.asked_owners else "")
        if self.estimate is not None and not self.estimate.messages:
            asked = "asks nobody"
        lines = [f"{self.method} would forget {', '.join(what)}; it {asked}."]
        if self.estimate is not None:
            cost = self.estimate
            lines.append(
                f"At most {cost.messages} messages to each, about {_megabytes(cost.bytes_down)} sent and "
                f"{_megabytes(cost.bytes_up)} received, {cost.sample_gradients:,.0f} sample-gradients"
                + (f", {self.seconds:.1f} s." if self.seconds is not None else "; the time depends on the clients.")
            )
        else:
            lines.append("How many messages it takes is not known beforehand.")
        return "\n".join([*lines, *self.warnings])


Check = FirstRound | LastRound | Learned
"""Something that those who stay are asked only to see whether training and data are told as they were."""


@dataclass(frozen=True)
class Choice:
    """The method that answers a request, with its options; made by ``choose``.

    Attributes:
        method: configured, never ``auto``.
        warnings: where it is not the method that should run.
        asks_owners: whether those who hold the data to forget are asked, so must be there: by the method, or to replay.
        checks: what those who stay are asked to see whether training and data are told as they were.
    """

    method: Method
    warnings: tuple[str, ...] = ()
    asks_owners: bool = False
    checks: tuple[Check, ...] = ()

    @property
    def may_miss(self) -> bool:
        """Whether clients that stay but are away may be left out."""
        return getattr(self.method.options, "missing", "refuse") == "leave-out"

    def with_checks(self, state: ServerState, parties: Parties, loss: Loss | None = None) -> Choice:
        """The same, where those who stay are asked besides whether training and data are told as they were.

        Args:
            state: the trained model, and what was kept.
            parties: who stays.
            loss: of the training, where it is known here. Elsewhere the one that they train with, whichever that is,
                an L2 term included, has to be lower than by the starting weights.
        """
        if not isinstance(self.method.options, StepOptions):
            return self
        learned = Learned(state, parties, CrossEntropy() if loss is None else loss)
        checks: list[Check] = [learned] if loss is not None or learned.start is not None else []
        if self.method.needs == "vectors":
            again = FirstRound.of(state, parties), LastRound.of(state, parties)
            checks += [check for check in again if check is not None]
        return replace(self, checks=(*self.checks, *checks))

    def of_a_store(self, state: ServerState, parties: Parties) -> Choice:
        """The same for a state that was read from a store: asked after, and what nobody has trained is told."""
        return self.with_checks(state, parties).doubting(_untrained(state))

    def doubting(self, sentences: Sequence[str]) -> Choice:
        """The same, with these among its warnings."""
        return replace(self, warnings=(*self.warnings, *sentences))

    def expected_rounds(self, state: ServerState, parties: Parties) -> int | None:
        """Message rounds at most, for a bar: by the options, and by what is known of the request; None if unknown."""
        allowed: int | None = getattr(self.method.options, "expected_rounds", None)
        if allowed is None or self.method.estimate is None:
            return allowed
        more = sum(check.estimate.messages for check in self.checks)
        return more + min(allowed, self.method.estimate(self.method.options, Size.of(state, parties)).messages)

    def run(self, engine: Engine, state: ServerState, request: Request) -> Outcome:
        """Forget; the outcome names the method that ran, and says why where it is not the one that should."""
        outcome = self.method(engine, state, request)
        with measured(engine) as cost:
            doubts = self._doubts(engine)
        return replace(outcome, cost=outcome.cost + cost, warnings=(*self.warnings, *doubts, *outcome.warnings))

    def _doubts(self, engine: Engine) -> tuple[str, ...]:
        """What the checks tell; the last round tells nothing where something else was told otherwise already."""
        found: tuple[str, ...] = ()
        for check in self.checks:
            found += () if found and isinstance(check, LastRound) else check.doubts(engine)
        return found

    def dry_run(self, engine: Engine, state: ServerState, request: Request) -> DryRun:
        """What ``run`` would do, or its refusal; in this process one client is asked for a few gradients to time."""
        require_possible(self.method, engine, state, request)
        remembered = state.memory.clients if state.memory is not None else ()
        parties = request.parties(engine.clients(), remembered)
        own = len(engine.validation.data) if engine.validation is not None else 0
        estimate, size = None, Size.of(state, parties, own)
        if self.method.estimate is not None:
            estimate = self.method.estimate(self.method.options, size)
            for check in self.checks:
                estimate += check.estimate
        return DryRun(
            self.method.label,
            parties.leaving,
            {name: len(indices) for name, indices in parties.partly.items()},
            tuple(parties.retained),
            self.asks_owners,
            estimate,
            _seconds(engine, state, parties, estimate),
            self.warnings,
        )


def choose(
    state: ServerState,
    parties: Parties,
    method: str = AUTO,
    options: Mapping[str, Any] | None = None,
    *,
    sums_only: bool = False,
    loss: Loss | None = None,
) -> Choice:
    """The method of that name with these options; ``auto`` is settled by what was kept while training.

    Args:
        state: the trained model, and what was kept.
        parties: who leaves, and who stays.
        method: any of ``expunge methods``.
        options: of that method; plain values will do.
        sums_only: whether only sums of the clients' replies are seen.
        loss: of the training, where it is known here, as it was told: ``auto`` takes Krylov products where it has no
            factors, and those who stay are asked whether the training was as it is told.
    """
    chosen = registered(method).configured(options or {})
    found, warnings = resolved(chosen, state, parties, sums_only=sums_only)
    replays = getattr(found.options, "source", "auto") == "replay" or not Size.of(state, parties).vectors
    asks = found.asks_owners or (found.needs == "vectors" and replays)
    if found.needs == "vectors" and state.memory is not None:
        doubts = state.memory.doubts(state.schedule, parties.leaving)
        warnings = (*warnings, *doubts, *state.memory.rounded(state.model))
    choice = Choice(found, warnings, asks)
    if loss is None:
        return choice
    choice = choice.with_checks(state, parties, loss)
    if chosen.name == AUTO and found.name == "retrace" and isinstance(loss, PerSample):
        shared = {part.name: getattr(found.options, part.name) for part in fields(StepOptions)}
        followed = shared["damping"] is None and state.schedule is not None
        krylov = registered("retrace-krylov").configured(shared | ({"filter": "response"} if followed else {}))
        warnings = (*warnings, WITHOUT_FACTORS.format(loss=loss.name))
        return replace(choice, method=krylov, warnings=warnings)
    return choice


@overload
def forget(
    model: nn.Module,
    clients: Mapping[str, Data],
    leaving: str | Sequence[str] = (),
    *,
    dry_run: Literal[True],
    **everything: Any,
) -> DryRun: ...


@overload
def forget(
    model: nn.Module,
    clients: Mapping[str, Data],
    leaving: str | Sequence[str] = (),
    *,
    dry_run: Literal[False] = False,
    **everything: Any,
) -> Outcome: ...


def forget(
    model: nn.Module,
    clients: Mapping[str, Data],
    leaving: str | Sequence[str] = (),
    *,
    samples: Mapping[str, Sequence[int]] | None = None,
    loss: object = "cross_entropy",
    l2: float = 0.0,
    memory: Memory | None = None,
    checkpoints: Mapping[int, nn.Module | Mapping[str, Tensor]] | None = None,
    recipe: Recipe | None = None,
    learning_rate: float | None = None,
    local_steps: float | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    validation: Data | None = None,
    collate: Collate | None = None,
    forward: Forward | None = None,
    parameters: Chosen | None = None,
    method: str = AUTO,
    progress: bool = True,
    dry_run: bool = False,
    **options: Any,
) -> Outcome | DryRun:
    """Take clients (or samples inside clients) out of a trained model.

    Args:
        model: the trained model; it is not changed (``outcome.write_to(model)`` does that).
        clients: names and data: a pair of tensors, a map-style dataset (of pairs, or of dicts with ``labels``), a
            DataLoader, or whatever ``LocalData`` takes. A client that leaves may be missing where ``memory``
            remembers it.
        leaving: clients to forget as a whole.
        samples: indices to forget inside clients that stay.
        loss: ``"cross_entropy"``, ``"binary_cross_entropy"``, ``"squared_error"``, ``"mean_squared_error"``, one of
            torch's loss modules, a ``Loss``, or a function of outputs and targets that gives one number a sample.
        l2: the training's L2 factor (weight decay).
        memory: what was recorded while training, with the training's recipe; it is checked against the model.
        checkpoints: global models of the training's way (or their state dicts) by the number of rounds before them:
            for samples whose client stays, and for clients that no vector was kept of.
        recipe: how clients and server trained, where there is no memory that knows it; plain SGD and averaging else.
        learning_rate: of the clients' optimiser, where the memory has not recorded it.
        local_steps: steps that a client made in one round, on average, where the memory has not recorded them.
        rounds: of the training; by default as many as the memory recorded.
        batch_size: of the training, for a recovery round or a short one after a long step; 64 where it is not given.
        validation: samples of your own: how long a step may be is then decided on them, not on the clients' word.
        collate: makes a batch of samples, for instance by padding; a DataLoader's own, or torch's, by default.
        forward: ``forward(model, batch)`` gives the outputs, where calling the model with the inputs does not.
        parameters: those that were trained together, where they are not all that are trainable (adapters, a body
            without its heads): names of parameters or of layers, or a function of a name; the memory's by default.
        method: its name; ``auto`` is retrace where the memory has a vector of everybody who leaves, or where there are
            checkpoints to replay from, else hf-kcu.
        progress: show a bar while it works, on a terminal.
        dry_run: only say what would be done, by which method, and what it would cost at most.
        options: any option of that method, such as ``curvature_samples=None`` or ``recovery=True``.

    Returns:
        What was done: the new weights, the memory for the next request, the cost, and the details; or the dry run.

    Example:
        >>> import torch
        >>> data = {name: (torch.randn(20, 2), torch.randint(0, 2, (20,))) for name in ("ada", "bob", "cyd")}
        >>> outcome = forget(nn.Linear(2, 2), data, leaving="ada", method="hf-kcu", damping=0.1, iterations=3)
        >>> outcome.method, outcome.succeeded
        ('hf-kcu', True)
    """
    _require_kinds(model, clients, memory, checkpoints)
    _require_numbers(learning_rate=learning_rate, local_steps=local_steps, rounds=rounds, batch_size=batch_size)
    recipe = None if recipe is None else as_recipe(recipe)
    trained_with = as_loss(loss, l2)
    schedule = _schedule(memory, learning_rate, local_steps, rounds, batch_size)
    if memory is not None and recipe not in (None, memory.recipe):
        raise RequestError("The memory knows another recipe than the one given here: give it to Memory(model, recipe).")
    if parameters is None and memory is not None:
        parameters = memory.parameters
    whole = trained = Snapshot.of(model, parameters)
    known = memory
    layout = whole.layers() if memory is None else memory.moved(whole)
    still = [name for name, _ in whole.layers().shapes if name not in dict(layout.shapes)]
    if memory is not None and still and memory.folder is None:  # what was frozen stays as it is
        trained = Snapshot.of(model, [name for name, _ in layout.shapes])
        memory = memory.refitted(whole.layers(), layout, trained.parameters)
    model = shared_copy(model, trained.layers())
    way = None if checkpoints is None else Checkpoints({n: _snapshot(trained, own) for n, own in checkpoints.items()})
    state = ServerState(trained, schedule, memory, checkpoints=way, recipe=recipe)
    engine = LocalEngine(model, trained_with, clients, validation=validation, collate=collate, forward=forward)
    request = Request.of(leaving, samples)
    parties = request.parties(engine.clients(), memory.clients if memory is not None else ())
    choice = choose(state, parties, method, options, sums_only=engine.sums_only, loss=trained_with)
    if still and trained is whole:
        choice = replace(choice, warnings=(*choice.warnings, UNMOVED_ON_DISK.format(names=listed(still))))
    for data in engine.local_data():
        require_fitting(model, data, trained_with, forward)
        choice = replace(choice, warnings=(*choice.warnings, *data.warnings))
    if dry_run:
        return choice.dry_run(engine, state, request)
    with progress_bars() if progress else nullcontext() as bars:
        if bars is not None:
            watch_rounds(engine, choice.expected_rounds(state, parties), bars)
        outcome = choice.run(engine, state, request)
    if trained is not whole:
        outcome = replace(outcome, state=_unfrozen(outcome, whole, known))
    told = _still_there(memory, outcome)
    return replace(outcome, warnings=(*outcome.warnings, *told)) if told else outcome


def _unfrozen(outcome: Outcome, whole: Snapshot, known: Memory | None) -> ServerState:
    """The state with the parameters that no round had changed: a forget leaves them alone, and later rounds may not."""
    state, layout = outcome.state, whole.layers()
    own = fit(state.model.parameters, state.model.layers(), layout, whole.parameters)
    model = replace(whole, parameters=own, buffers={**whole.buffers, **state.model.buffers})
    if not outcome.succeeded or state.memory is None:
        return replace(state, model=model, memory=None if state.memory is None else known)
    memory = state.memory.refitted(state.model.layers(), layout, own)
    return replace(state, model=model, memory=memory.bound_to(model, memory.server_momentum))


def _untrained(state: ServerState) -> tuple[str, ...]:
    """A sentence where a part of the model was never trained, though it could have been."""
    memory, layout = state.memory, state.model.layers()
    start = memory.place.beginning if memory is not None and memory.place is not None else None
    if memory is None:
        return ()
    if start is None:
        still = {name for name, _ in layout.shapes} - {name for name, _ in memory.moved(state.model).shapes}
    else:  # up to the rounding of means
        before, now = layout.unflatten(start), layout.unflatten(state.model.parameters.to(start))
        still = {name for name in now if torch.allclose(now[name], before[name], rtol=UNMOVED, atol=0.0)}
    return (
        (UNTRAINED.format(names=listed([repr(name) for name in sorted(still)])),)
        if 0 < len(still) < len(layout.shapes)
        else ()
    )


def _require_kinds(model: object, clients: object, memory: object, checkpoints: object) -> None:
    """Things of the right kind, before anything is done with them."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Forget takes the trained model itself, not {type(model).__name__}: load the weights into it."
        )
    if not isinstance(clients, Mapping):
        raise RequestError(f"Clients are given by name, as {{'ada': data}}, not as {type(clients).__name__}.")
    if not isinstance(memory, Memory | None):
        raise RequestError("The memory is what was recorded while training, or what Memory.load(path) gives back.")
    if not isinstance(checkpoints, Mapping | None):
        raise RequestError("Checkpoints are given by the number of rounds before them, as {3: early, 10: middle}.")


def _require_numbers(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Real | None):
            raise RequestError(f"The training's {name} must be a number, not {value!r}.")


def _still_there(memory: Memory | None, outcome: Outcome) -> tuple[str, ...]:
    """The warning that vectors on disk are as they were, until the caller says so."""
    if memory is None or memory.folder is None or not outcome.succeeded:
        return ()
    if outcome.memory is None or outcome.memory.folder is None:
        return (f"{memory.folder} still holds the vectors from before, which no longer fit the model: delete it.",)
    return (
        f"{memory.folder} is as it was before: outcome.memory.save() brings it to the new model, and deletes what it "
        "keeps of those who left.",
    )


def _refuse_alone(**given: int | None) -> None:
    """What would be ignored without the rest of the training's schedule is refused."""
    for name, value in given.items():
        if value is not None:
            raise RequestError(
                f"The training's {name} alone changes nothing: give its learning_rate and local_steps too."
            )


def _schedule(
    memory: Memory | None,
    learning_rate: float | None,
    local_steps: float | None,
    rounds: int | None,
    batch_size: int | None,
) -> Schedule | None:
    """The training's schedule, as recorded or as given: whole, or not at all."""
    size = 64 if batch_size is None else batch_size
    recorded = memory.schedule(size) if memory is not None else None
    if recorded is not None:
        for name, value in {"learning_rate": learning_rate, "local_steps": local_steps}.items():
            known, apart = getattr(recorded, name), RECORDED_OTHERWISE[name]
            if value is not None and not known / apart <= value <= known * apart:
                raise RequestError(
                    f"The memory has recorded a {name} of {known:.4g}, not {value:g}: leave it out here."
                )
        return recorded
    if learning_rate is None and local_steps is None:
        _refuse_alone(rounds=rounds, batch_size=batch_size)
        return None
    if rounds is None and memory is not None:
        rounds = memory.rounds
    given = {"learning_rate": learning_rate, "local_steps": local_steps, "rounds": rounds}
    missing = [name for name, value in given.items() if value is None]
    if learning_rate is None or local_steps is None or rounds is None:
        raise RequestError(f"To know how the model was trained, {missing[0]} is missing beside what you gave.")
    return Schedule(learning_rate, local_steps, rounds, size)


def _snapshot(like: Snapshot, given: nn.Module | Mapping[str, Tensor]) -> Snapshot:
    """A checkpoint as a snapshot of this architecture."""
    tensors = given.state_dict() if isinstance(given, nn.Module) else given
    try:
        parameters = like.layers().flatten(tensors).to(like.parameters)
    except ModelError as problem:
        raise DataError(f"A checkpoint is not of this model: {problem}") from problem
    names = named_as(like.buffers, tensors)
    for name in like.buffers:
        if "running_" in name and name not in names:
            raise DataError(f"A checkpoint is not of this model: {name!r} is missing, and statistics belong to it.")
    buffers = {name: tensors[names[name]].to(own) if name in names else own for name, own in like.buffers.items()}
    found = replace(like, parameters=parameters, buffers=buffers)
    found.require_finite()
    return found


def _seconds(engine: Engine, state: ServerState, parties: Parties, estimate: Estimate | None) -> float | None:
    """About how long the estimated work takes here, from a few timed gradients of a client; elsewhere nobody knows."""
    if estimate is None or not isinstance(engine, LocalEngine):
        return None
    name = max(parties.retained, key=lambda client: parties.counts[client])
    task = {name: Gradient(state.model, exclude=parties.retained[name], draw=Draw(64, seed=0))}
    apart = engine.without(())  # with an account of its own
    apart.ask(task)  # the first one loads libraries
    before, started = apart.cost.sample_gradients, time.perf_counter()
    apart.ask(task)
    return (time.perf_counter() - started) / (apart.cost.sample_gradients - before) * estimate.sample_gradients


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
