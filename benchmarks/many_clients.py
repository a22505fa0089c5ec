"""Whether a round and a forget cost by the size of the federation: the memory's part of both, vectors on disk.

    python benchmarks/many_clients.py --clients 1000 100000

Random updates of random clients are recorded, then one client leaves: everything that a forget by retrace calls on a
memory is called, and the folder is saved without the leaver. Each size runs in a process of its own, whose peak of
resident memory is told. What is asked of devices is not in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from expunge.core.vectors import Snapshot
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.pulls import recorded

MEGABYTE = 1e6

REPEATED = 9
"""A forget leaves the memory as it was, so that it can be timed so many times."""


def main() -> None:
    """Print a line for each size."""
    options = _options()
    if options.inside is not None:
        print(json.dumps(measured(options.inside, options)))
        return
    print("  clients remembered  s a round  s a forget  s to save  MB held  MB on disk")
    for count in options.clients:
        arguments = [*sys.argv[1:], "--inside", str(count)]
        done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        print(
            f"{count:>9,} {row['remembered']:>10,} {row['round']:>10.3f} {row['forget']:>11.3f} {row['save']:>10.3f} "
            f"{row['resident_megabytes']:>8,.0f} {row['disk_megabytes']:,.0f}",
            flush=True,
        )


def measured(count: int, options: argparse.Namespace) -> dict[str, float]:
    """Train on nothing but noise, forget one of those who took part most often, and save."""
    torch.set_num_threads(options.threads)
    source = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place) / "memory"
        memory = Memory(Snapshot(torch.zeros(options.parameters), {}), folder=folder)
        rounds = [_round(memory, count, options, source) for _ in range(options.rounds)]
        shares = memory.shares
        gone = max(shares[-1], key=lambda name: sum(name in each for each in shares))
        left: list[Memory] = []
        forget = statistics.median(_seconds(lambda: left.append(_forgotten(memory, gone))) for _ in range(REPEATED))
        save = _seconds(left[0].save)
        assert memory.folder == folder
        disk = sum(file.stat().st_size for file in folder.iterdir())
        return {
            "remembered": 1 + len(left[0].clients),
            "round": statistics.median(rounds[len(rounds) // 2 :]),  # where most of those who are drawn are known
            "forget": forget,
            "save": save,
            "resident_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE,
            "disk_megabytes": disk / MEGABYTE,
        }


def _round(memory: Memory, count: int, options: argparse.Namespace, source: torch.Generator) -> float:
    """Seconds of recording one."""
    chosen = torch.randperm(count, generator=source)[: options.drawn].tolist()
    updates = {f"device-{number}": torch.randn(options.parameters, generator=source) for number in chosen}
    weights = dict.fromkeys(updates, 20.0)
    return _seconds(lambda: memory.record(updates, weights, learning_rate=0.1, steps=2))


def _forgotten(memory: Memory, gone: str) -> Memory:
    """What unlearning/retrace.py and what it calls ask of a memory."""
    assert memory._place is not None
    model = Snapshot(memory._place.now, {})
    memory.require_model(model)
    state = ServerState(model, memory.schedule(10), memory)
    assert gone in memory.clients
    recorded(state, [gone])
    memory.doubts(state.schedule)
    memory.loudness([gone])
    memory.norms([gone])
    left = memory.without([gone]).bound_to(model)
    left.require_model(model)
    return left


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The memory's part of a round and of a forget, by clients.")
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--drawn", type=int, default=100, help="clients in a round")
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the vectors are put meanwhile")
    parser.add_argument("--inside", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
