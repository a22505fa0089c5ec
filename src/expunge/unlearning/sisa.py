"""SISA (Bourtoule et al. 2021) over clients: only the shards that held the forgotten data are trained again.

Each of them goes back to the checkpoint before the first slice with a leaver in it (or with a client that loses
samples) and trains the stages from there on without. The other shards stay as they are, bit for bit, and their
clients are not asked for anything. What comes out never saw the forgotten data: this is retraining, of a part.

A slice that nobody is left in stays as a stage without anybody new; a shard that nobody is left in leaves the ensemble.

Where it fails: training has to be sharded from the start (shards.py), every shard learns from its own clients only,
which costs accuracy where clients differ, and one leaver in each shard costs as much as retraining.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expunge.errors import RequestError
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.shards import Shard, Shards
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Progress
from expunge.federation.training.sharded import in_all, trained_from
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Parties, Request


@dataclass(frozen=True, eq=False)
class SisaOptions:
    """How a shard trains was settled by the training.

    Attributes:
        progress: called after each round.
    """

    progress: Progress | None = None


def sisa(engine: Engine, state: ServerState, request: Request, options: SisaOptions) -> Outcome:
    """Forget clients, or samples inside clients, exactly.

    Args:
        engine: reaches the clients of the shards that are touched; whole clients that leave need not be there.
        state: the ensemble with its shards; it is left untouched.
        request: what is to be forgotten.
        options: nothing but progress.
    """
    state.model.require_finite()
    if state.shards is None:
        raise RequestError("SISA needs a training by train_sharded: this model has no shards.")
    reachable = {name: count for name, count in engine.clients().items() if name in state.shards.clients}
    parties = request.parties(reachable, state.shards.clients)
    first = {index: _first_stage(shard, parties) for index, shard in enumerate(state.shards.shards)}
    reduced = {index: _reduced(shard, parties) for index, shard in enumerate(state.shards.shards)}
    left = {index: shard for index, shard in reduced.items() if shard.clients}
    if not left:
        raise RequestError("The request would leave no client in any shard: start a new model.")
    again = {index: stage for index, stage in first.items() if stage is not None and index in left}
    for index in again:
        if away := [name for name in left[index].clients if name not in reachable]:
            raise RequestError(f"Client {away[0]!r} stays but cannot be reached, and its shard trains: wait for it.")
    rounds = sum(plan.rounds for index, stage in again.items() for plan in left[index].plans[stage:])
    progress = in_all(options.progress, rounds)
    with measured(engine) as cost:
        for index, stage in again.items():
            left[index] = trained_from(left[index], engine, stage, progress)
    shards = Shards(tuple(left.values()))
    details = {
        "shards": len(shards.shards),
        "retrained": [{"shard": i, "from_stage": stage, "stages": len(left[i].slices)} for i, stage in again.items()],
        "emptied": [index for index in first if index not in left],
    }
    after = replace(state, model=shards.model, memory=None, history=None, shards=shards, checkpoints=None)
    return Outcome("sisa", after, cost, details=details)


def _first_stage(shard: Shard, parties: Parties) -> int | None:
    """The first stage that saw something to forget; None where the shard saw nothing of it."""
    touched = (stage for stage, names in enumerate(shard.slices) if any(name in parties.owners for name in names))
    return next(touched, None)


def _reduced(shard: Shard, parties: Parties) -> Shard:
    """The shard without what is to be forgotten: those who leave, and those who have no samples left."""
    left_out = {name: indices for name, indices in shard.left_out.items() if name not in parties.leaving}
    for name in set(shard.clients) & set(parties.partly):
        left_out[name] = tuple(sorted({*left_out.get(name, ()), *parties.partly[name]}))
    gone = {*parties.leaving, *(name for name in left_out if len(left_out[name]) == parties.counts.get(name))}
    slices = tuple(tuple(name for name in names if name not in gone) for names in shard.slices)
    return replace(shard, slices=slices, left_out={name: out for name, out in left_out.items() if name not in gone})


register(
    Method(
        "sisa",
        sisa,
        SisaOptions(),
        "only the shards that held the data train again, from a checkpoint",
        needs="shards",
    )
)
