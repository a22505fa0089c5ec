"""What retrace asks of a device, without one: operator calls, synchronisations and seconds by phase of a request.

A small network on a GPU waits for launches and synchronisations, not for arithmetic, so their number is what its clock
shows. The paper's CNN is trained on few samples, while the memory records as many steps as 6000 samples a client take.

Usage: python benchmarks/launches.py [--training adam] [--long] [--samples 40]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from expunge.core import factored, kronecker, vectors
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines import client, looking
from expunge.federation.engines.local import LocalEngine
from expunge.federation.engines.summing import Summing
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, FedAvgM, Recipe
from expunge.federation.training.response import Response
from expunge.models import build
from expunge.unlearning import repair, retained
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

PLANS = {
    "sgd": TrainingPlan(20, 2, 64, 0.02),
    "adam": TrainingPlan(20, 2, 64, 0.001, recipe=Recipe(Adam())),
    "adamw": TrainingPlan(20, 2, 64, 0.001, recipe=Recipe(AdamW()), cosine=True),
    "fedavgm": TrainingPlan(20, 2, 64, 0.02, recipe=Recipe(SGD(), FedAvgM(0.3, 0.9))),
}

PHASES: dict[str, tuple[tuple[Any, str], ...]] = {
    "factors": ((retained.Retained, "factors"),),
    "eigenvectors": ((kronecker.KroneckerCurvature, "__init__"),),
    "filters applied": ((kronecker.KroneckerCurvature, "apply"),),
    "response": ((Response, "lefts"), (Response, "travels")),
    "losses": ((retained.Retained, "_told"),),
    "short round": ((repair.ShortRound, "updates"),),
    "gradient": ((retained.Retained, "gradient"),),
    "digests": ((vectors, "tensors_digest"),),
    "memory": ((Memory, "record"), (Memory, "without"), (Memory, "bound_to"), (Memory, "require_model")),
}
"""Which functions are a phase; what one calls of another counts there."""

SYNCHRONISING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


class Phases:
    """The phase that is running now, and what each has taken."""

    def __init__(self) -> None:
        self.running, self._since = ["the rest"], time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def turn(self) -> None:
        """Time up to now belongs to the innermost phase."""
        now = time.perf_counter()
        self.seconds[self.running[-1]] += now - self._since
        self._since = now

    def named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as a phase."""

        @functools.wraps(function)
        def inside(*given: Any, **more: Any) -> Any:
            self.turn()
            self.running.append(name)
            try:
                return function(*given, **more)
            finally:
                self.turn()
                self.running.pop()

        return inside


class Counting(TorchDispatchMode):
    """Counts operators by phase."""

    def __init__(self, phases: Phases) -> None:
        super().__init__()
        self._phases = phases

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, phase = function.name().split(".")[0], self._phases.running[-1]
        self._phases.calls[phase] += not function.is_view
        self._phases.waits[phase] += name in SYNCHRONISING
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched(phases: Phases) -> Iterator[None]:
    """Inside it, functions of a phase say so."""
    saved = [(place, name, getattr(place, name)) for own in PHASES.values() for place, name in own]
    for phase, own in PHASES.items():
        for place, name in own:
            setattr(place, name, phases.named(phase, getattr(place, name)))
    try:
        yield
    finally:
        for place, name, before in saved:
            setattr(place, name, before)


def federation(plan: TrainingPlan, samples: int) -> tuple[LocalEngine, ServerState]:
    """Ten clients with so many samples on average, trained; the memory says that they had 6000."""
    chance = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 1, 28, 28, generator=chance)
    data = {}
    for number in range(10):
        count = round(samples * (0.5 + number / 9))
        labels = torch.randint(10, (count,), generator=chance)
        inputs = 0.3 * centres[labels] + 0.5 * torch.randn(count, 1, 28, 28, generator=chance)
        data[f"client-{number}"] = (inputs, labels)
    model = build("cnn", 1, 28, 10, seed=0)
    engine = LocalEngine(model, CrossEntropy(), data)
    # As on a GPU: all clients in one pass, and passes as large as one's.
    engine._summing = Summing(4 << 30)
    factored.CHUNK = client.CURVED = looking.CHUNK = looking.MANY
    state = train(engine, Snapshot.of(model), replace(plan, learning_rate=5 * plan.learning_rate))
    assert state.memory is not None
    real = {name: 2 * math.ceil(150 * count / samples * 6000 / 9600) for name, count in engine.clients().items()}
    rounds = [
        replace(each, steps=real, rates=dict.fromkeys(each.shares, plan.rate(number)))
        for number, each in enumerate(state.memory._kept)
    ]
    state.memory._kept = rounds
    return engine, state


def request(engine: LocalEngine, state: ServerState, *, long: bool) -> tuple[Any, float]:
    """One request, and its seconds."""
    chosen = method("retrace").configured({"long_step_ratio": 1e-6} if long else {})
    started = time.perf_counter()
    outcome = chosen(engine, state, Request.of("client-4"))
    return outcome, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", choices=tuple(PLANS), action="append")
    parser.add_argument("--long", action="store_true", help="take any step for a long one: a short round follows")
    parser.add_argument("--samples", type=int, default=40, help="of a client, on average")
    parser.add_argument("--save", help="where the new parameters go, to compare two versions")
    asked = parser.parse_args()
    for name in asked.training or PLANS:
        engine, state = federation(PLANS[name], asked.samples)
        _, first = request(engine, state, long=asked.long)
        timed = Phases()
        with watched(timed):
            outcome, seconds = request(engine, state, long=asked.long)
            timed.turn()
        counted = Phases()
        with watched(counted), Counting(counted):
            request(engine, state, long=asked.long)
        told = {part: round(own["length"], 3) for part, own in outcome.details.items() if isinstance(own, dict)}
        print(f"\n{name}: {seconds:.3f} s (the first {first:.3f} s), {told}, {outcome.cost.rounds} messages")
        print(f"{'':18}{'operators':>10}{'waits':>8}{'seconds':>10}")
        for phase in sorted(counted.calls, key=lambda each: -counted.calls[each]):
            print(f"{phase:18}{counted.calls[phase]:10,}{counted.waits[phase]:8,}{timed.seconds[phase]:10.3f}")
        print(f"{'all':18}{counted.calls.total():10,}{counted.waits.total():8,}{sum(timed.seconds.values()):10.3f}")
        if asked.save:
            torch.save(outcome.state.model.parameters, f"{asked.save}-{name}.pt")


if __name__ == "__main__":
    main()
