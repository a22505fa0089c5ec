"""Whether a Recorder's round, and what a forget does to its store, cost by how many sites it knows.

    python benchmarks/recorder_rounds.py --sites 20 200 2000

The store is filled with rounds of random updates, as if that many sites had taken part; then a Recorder goes on from
it, with rounds of a few of them. Of each round everything is timed that the Recorder does between the replies and the
next round; what is written is counted by the kernel (/proc/self/io). Then one site leaves: what a forget by retrace
asks of the memory is called, and the store goes on without that site. No site works.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from expunge.core.vectors import Snapshot
from expunge.federation.engines.flower.stamps import STAMP
from expunge.federation.keeping.book import Book
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.keeping.state_store import StateStore
from expunge.federation.training.plan import Schedule
from expunge.flower import SGD, Recorder
from expunge.unlearning.pulls import recorded

MEGABYTE = 1e6

REPEATED = 5


def main() -> None:
    """Print a line for each size."""
    options = _options()
    torch.set_num_threads(options.threads)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    print("  sites  s a round  MB a round  s a forget  MB a forget")
    for count in options.sites:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            print(f"{count:>7,} " + " ".join(measured(count, Path(place) / "store", options)), flush=True)


def measured(count: int, store: Path, options: argparse.Namespace) -> list[str]:
    """Seconds and megabytes of a round and of a forget."""
    source, model = torch.Generator().manual_seed(0), nn.Linear(options.parameters - 1, 1)
    _fill(store, model, count, options, source)
    recorder = Recorder(
        _Given(), model=model, store=store, optimiser=SGD(), learning_rate=0.1, batch_size=10, local_epochs=1
    )
    rounds = list(_rounds(recorder, count, options, source))[1:]
    seconds, written = ([each[at] for each in rounds] for at in (0, 1))
    left = _spent(lambda: _forget(StateStore(store), model))
    return [
        f"{statistics.median(seconds):>10.3f} {statistics.median(written):>11.1f}",
        f"{left[0]:>11.3f} {left[1]:>12.1f}",
    ]


class _Given(FedAvg):
    """Asks nobody: replies are given."""

    def configure_train(self, *_: Any) -> list[Message]:
        return []


class _Nobody:
    """A grid without nodes."""

    def get_nodes(self) -> list[Any]:
        return []


def _fill(store: Path, model: nn.Module, count: int, options: argparse.Namespace, source: torch.Generator) -> None:
    """Rounds of as many sites as take part, until everybody has."""
    memory = Memory(Snapshot.of(model))
    for first in range(0, count, options.drawn):
        names = [_name(number) for number in range(first, min(first + options.drawn, count))]
        updates = {name: 1e-3 * torch.randn(options.parameters, generator=source) for name in names}
        memory.record(updates, dict.fromkeys(names, 20.0), learning_rate=0.1, steps=2)
    assert memory.place is not None
    snapshot = Snapshot.of(model).moved(memory.place.now)
    state = ServerState(snapshot, Schedule(0.1, 2.0, memory.rounds), memory.bound_to(snapshot, goes_on=True))
    StateStore(store).write(Book(counts={_name(number): 20 for number in range(count)}), state, model)


def _rounds(
    recorder: Recorder, count: int, options: argparse.Namespace, source: torch.Generator
) -> Iterator[tuple[float, float]]:
    """Seconds and megabytes of each, one more than are counted."""
    grid: Any = _Nobody()
    for number in range(1, REPEATED + 2):
        arrays = recorder.arrays
        recorder.configure_train(number, arrays, ConfigRecord(), grid)
        names = [_name(at) for at in torch.randperm(count, generator=source)[: options.drawn].tolist()]
        replies = [_reply(name, arrays, source) for name in names]
        yield _spent(lambda number=number, replies=replies: recorder.aggregate_train(number, replies))


def _reply(name: str, arrays: ArrayRecord, source: torch.Generator) -> Message:
    sent = {
        key: own + 1e-3 * torch.randn(own.shape, generator=source) for key, own in arrays.to_torch_state_dict().items()
    }
    content: dict[str, Any] = {"arrays": ArrayRecord(sent), "metrics": MetricRecord({"num-examples": 20})}
    content[STAMP] = ConfigRecord({"site": name, "samples": 20})
    return Message(RecordDict(content), reply_to=Message(RecordDict(), dst_node_id=7, message_type="train"))


def _forget(store: StateStore, model: nn.Module) -> None:
    """What forgetting the first site asks of the memory, and the store without it."""
    state, gone = store.load(model), _name(0)
    assert state.memory is not None
    state.memory.require_model(state.model)
    recorded(state, [gone])
    state.memory.doubts(state.schedule)
    state.memory.loudness([gone])
    counts = {name: own for name, own in store.book.counts.items() if name != gone}
    book = dataclasses.replace(store.book, counts=counts, departed=(gone,))
    store.write(book, state.moved(state.model, state.memory.without([gone])), model)


def _name(number: int) -> str:
    return f"site-{number}"


def _spent(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and megabytes written."""
    written, started = _written(), time.perf_counter()
    work()
    return time.perf_counter() - started, (_written() - written) / MEGABYTE


def _written() -> int:
    lines: Sequence[str] = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Recorder's round and its store's part of a forget, by sites.")
    parser.add_argument("--sites", type=int, nargs="+", default=[20, 200, 2000])
    parser.add_argument("--drawn", type=int, default=10, help="sites in a round")
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the stores are put meanwhile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
