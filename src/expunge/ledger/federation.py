"""What a federation file says: the model, how clients are reached, where the state is kept, what an audit may ask.

    federation = Federation(model=network, clients=clients, plan=TrainingPlan(rounds=20), unseen=unseen)

``expunge init`` writes one with comments. It is Python that this machine runs: keep it as you keep your training code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.core.batch import Forward
from expunge.core.losses import as_loss
from expunge.core.vectors import Snapshot
from expunge.errors import DataError, ExpungeError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.local_data import Collate, Data
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.fedavg import Keep, Progress, train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.request import Request

_PLAIN = (TrainingPlan, Recovery)


@dataclass(frozen=True)
class Federation:
    """One federation, as its file describes it.

    Attributes:
        model: makes the model with fresh weights.
        clients: gives names and data of all clients in this process; None for a Flower deployment.
        plan: how they train, and retrain for an audit.
        store: the folder of the trained state, relative to the file; a Recorder's store for Flower.
        loss: of the training.
        l2: the training's L2 factor.
        validation: gives samples of your own, on which the safety belt looks at the loss.
        unseen: gives samples that nobody trained on; without them there is no audit.
        forgotten: gives the data of a client that leaves, for the audit; by default what ``clients`` has of it.
        trigger: stamps inputs, where the data to forget held a backdoor.
        target: the class that the trigger asks for.
        not_reached: places that hold copies which expunge cannot delete, in a sentence each; they stand in receipts.
        collate: makes a batch of samples, for instance by padding; torch's own where it is not given.
        forward: ``forward(model, batch)`` gives the outputs, where calling the model with the inputs does not.
        folder: of the file.
    """

    model: Callable[[], nn.Module]
    clients: Callable[[], Mapping[str, Data]] | None = None
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    store: str | Path = "store"
    loss: object = "cross_entropy"
    l2: float = 0.0
    validation: Callable[[], Data] | None = None
    unseen: Callable[[], Data] | None = None
    forgotten: Callable[[str], Data] | None = None
    trigger: Callable[[Tensor], Tensor] | None = None
    target: int | None = None
    not_reached: tuple[str, ...] = ()
    collate: Collate | None = None
    forward: Forward | None = None
    folder: Path = Path()

    @classmethod
    def load(cls, file: Path) -> Federation:
        """Run a federation file, and take the ``federation`` that it makes."""
        if not file.is_file():
            raise RequestError(f"There is no {file}: make one with `expunge init`.")
        spec = importlib.util.spec_from_file_location("federation_file", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ExpungeError:
            raise
        except Exception as problem:  # whatever somebody's own code raises
            reason = str(problem).split("\n")[0][:300]
            raise RequestError(f"{file} cannot be used: {type(problem).__name__}: {reason}.") from problem
        found = getattr(module, "federation", None)
        if not isinstance(found, cls):
            raise RequestError(f"{file} makes no `federation = Federation(...)`: `expunge init` writes one that does.")
        return replace(found, folder=file.resolve().parent)

    def state_store(self) -> StateStore:
        """Where the trained state is."""
        return StateStore(self.folder / self.store)

    def data(self) -> dict[str, Data]:
        """Everybody's data, where it is in this process."""
        if self.clients is None:
            raise RequestError("The clients are in a Flower deployment: they train, and answer, in its apps.")
        found = dict(self.clients())
        if not all(isinstance(name, str) and name and name.isprintable() for name in found):
            raise DataError("Every client in the federation file needs a name, and names are texts to be read.")
        return found

    def engine(self, departed: Sequence[str] = ()) -> LocalEngine:
        """Reaches the clients that have not left."""
        data = {name: own for name, own in self.data().items() if name not in departed}
        own = self.validation() if self.validation is not None else None
        loss = as_loss(self.loss, self.l2)
        return LocalEngine(self.model(), loss, data, validation=own, collate=self.collate, forward=self.forward)

    def initial(self, seed: int) -> Snapshot:
        """Fresh weights, always the same for a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Snapshot.of(self.model())

    def module(self, snapshot: Snapshot) -> nn.Module:
        """A model with these weights, that answers and does not train."""
        module = self.model().eval()
        snapshot.write_to(module)
        return module

    def trained(
        self, seed: int, without: Request | None = None, rounds: int | None = None, start: int | None = None
    ) -> ServerState:
        """Train for an audit: without somebody, for as many rounds as are wanted, from this seed's weights.

        ``start`` is the seed of the weights where it is another one than that of the batches.
        """
        departed = self.state_store().book.departed
        engine = self.engine(departed)
        counts = engine.clients()
        retained = (
            without.parties(counts, without.clients).retained if without is not None else dict.fromkeys(counts, ())
        )
        plan = replace(self.plan, seed=seed, rounds=rounds or self.plan.rounds)
        first = self.initial(seed if start is None else start)
        return train(engine, first, plan, clients=retained, keep=Keep(vectors=False))

    def completed(self, method: str, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """A method's options with what only the federation knows: how to retrain, from which fresh weights."""
        if method != "retrain":
            return dict(options)
        return {"start": self.initial(seed), "plan": replace(self.plan, seed=seed), **options}

    def train(self, progress: Progress | None = None) -> tuple[StateStore, tuple[str, ...]]:
        """Train from fresh weights into the store; who has left stays out, and is told.

        Returns:
            The store, and who was left out.
        """
        store = self.state_store()
        with store.alone():
            departed = [name for name in store.book.departed if name in self.data()]
            engine = self.engine(store.book.departed)
            state = train(engine, self.initial(self.plan.seed), self.plan, progress=progress)
            self._write(state, store)
        return store, tuple(departed)

    def keep(self, model: nn.Module, memory: Memory | None = None) -> None:
        """Put a model that you trained yourself into the store, with what was recorded while it trained.

        The plan has to say how it was trained: learning rate, epochs and batch size.
        """
        store = self.state_store()
        counts = self.engine(store.book.departed).clients()
        rounds = memory.rounds if memory is not None else self.plan.rounds
        schedule = replace(self.plan, rounds=rounds).schedule(counts)
        self._write(ServerState(Snapshot.of(model), schedule, memory), store)

    def _write(self, state: ServerState, store: StateStore) -> None:
        """Put a state into the place of the one that was there."""
        if store.book.pending is not None:
            raise RequestError(f"A request is being worked on in {store.folder}: `expunge request resume` it first.")
        counts = self.engine(store.book.departed).clients()
        store.write(replace(store.book, counts=counts), state, self.model())

    def readmit(self, client: str) -> None:
        """Let a client that has left train again."""
        store = self.state_store()
        with store.alone():
            left = tuple(name for name in store.book.departed if name != client)
            keys = {name: own for name, own in store.book.keys.items() if name != client}  # it may have a new one
            store.write(replace(store.book, departed=left, keys=keys))


def described(options: Any) -> dict[str, Any]:
    """A method's options as plain values, those that are not given left out.

    Example:
        >>> from expunge.unlearning.recovery import Recovery
        >>> described(Recovery(epochs=2))["epochs"]
        2
    """
    own = {part.name: getattr(options, part.name) for part in fields(options)} if options is not None else {}
    plain = {name: asdict(value) if isinstance(value, _PLAIN) else value for name, value in own.items()}
    return {name: value for name, value in plain.items() if value is not None and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | bool | None)
