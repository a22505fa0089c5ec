"""Where the seconds of a request go on a device: by phase, by function, by operator; launches and synchronisations.

Models are those of scaling.py, trained for few epochs; the memory records as many steps as the whole training takes.

Usage: python benchmarks/profile_request.py --device cuda [--only cnn] [--out profile.txt]
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import io
import pstats
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import launches
import scaling

from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import Keep, train
from expunge.unlearning import half_way, pulls, repair, retained, retrace
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request

SHOWN = ("cnn", "vit-lite", "resnet18", "encoder 3M", "encoder 20M")
MORE: dict[str, tuple[tuple[Any, str], ...]] = {
    "products": ((half_way.ByProducts, "of"),),
    "answers": ((retrace, "answered"),),
    "coupling": ((retained.Retained, "product"),),
    "statistics": ((retained.Retained, "statistics"),),
    "correction": ((repair.Correction, "__call__"),),
    "calibration": ((repair.Calibration, "__call__"),),
    "step by filter": ((pulls.Pull, "left"),),
    "take": ((retrace, "take"),),
    "ready": ((retrace, "_ready"),),
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


class Phases(launches.Phases):
    """With the device's work done at every border."""

    def turn(self) -> None:
        """Time up to now, the device's included."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super().turn()


def trained(case: scaling.Case, device: str) -> tuple[Any, ServerState]:
    """An engine maker and the state after a short training whose memory says that it was the whole one."""
    made, start, _ = scaling.federation(case, device)
    short = case.trained != case.plan.rounds
    rounds = 1 if short else case.plan.rounds
    plan = dataclasses.replace(case.plan, rounds=rounds, epochs=1)
    state = train(made(), start, plan, keep=Keep(checkpoints=0))
    assert state.memory is not None
    times = case.plan.epochs
    state.memory._kept = [
        dataclasses.replace(each, steps={name: times * own for name, own in each.steps.items()})
        for each in state.memory._kept
    ]
    return made, state


def request(made: Any, state: ServerState, *, long: bool) -> Any:
    """One request; a long one goes half way and is followed by a short round."""
    chosen = method("retrace").configured({"long_step_ratio": 1e-6} if long else {})
    return chosen(made(), state, Request.of(scaling.LEAVER))


def by_function(work: Any) -> str:
    profile = cProfile.Profile()
    profile.enable()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profile.disable()
    told = io.StringIO()
    stats = pstats.Stats(profile, stream=told)
    stats.sort_stats("tottime").print_stats(25)
    stats.sort_stats("cumtime").print_stats(60)
    return told.getvalue()


def by_operator(work: Any, device: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    with profile(activities=activities, acc_events=False) as found:
        work()
        if device != "cpu":
            torch.cuda.synchronize()
    averages = found.key_averages()
    counts: Counter[str] = Counter()
    for each in averages:
        if each.key in WAITS:
            counts["waits"] += each.count
        if each.key in LAUNCHES:
            counts["launches"] += each.count
        if each.key == "cudaMemcpyAsync":
            counts["copies"] += each.count
    by = "self_cuda_time_total" if device != "cpu" else "self_cpu_time_total"
    table = averages.table(sort_by=by, row_limit=25, max_name_column_width=60)
    also = averages.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60)
    return f"{dict(counts)}\n{table}\n{also}"


def told(name: str, case: scaling.Case, device: str, *, operators: bool) -> str:
    started = time.perf_counter()
    made, state = trained(case, device)
    ready = time.perf_counter() - started
    warm = [scaling.timed(lambda: request(made, state, long=case.attack), device)[1] for _ in range(2)]
    phases = Phases()
    launches.PHASES |= MORE
    with launches.watched(phases):
        outcome = request(made, state, long=case.attack)
        phases.turn()
    lines = [f"\n######## {name}: {warm[-1]:.3f} s (the first {warm[0]:.3f} s), training {ready:.1f} s"]
    lines.append(f"{outcome.cost.rounds} messages, {outcome.details.get('steps')}, {list(outcome.details)}")
    lines.append(f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device != "cpu" else "")
    for phase, own in sorted(phases.seconds.items(), key=lambda each: -each[1]):
        lines.append(f"{phase:20}{own:10.4f}")
    lines.append(f"{'all':20}{sum(phases.seconds.values()):10.4f}")
    lines.append(by_function(lambda: request(made, state, long=case.attack)))
    if operators:
        lines.append(by_operator(lambda: request(made, state, long=case.attack), device))
    return "\n".join(line for line in "\n".join(lines).splitlines() if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--operators", default="", help="models whose operators are listed, too: names begin so")
    parser.add_argument("--out", type=Path, default=Path("profile.txt"))
    asked = parser.parse_args()
    with asked.out.open("w") as out:
        for name, case in scaling.cases(tiny=asked.tiny).items():
            if not name.startswith(asked.only) or not (asked.tiny or asked.only or name.startswith(SHOWN)):
                continue
            started = time.perf_counter()
            try:
                print(
                    told(
                        name,
                        case,
                        asked.device,
                        operators=bool(asked.operators) and name.startswith(tuple(asked.operators.split(","))),
                    ),
                    file=out,
                    flush=True,
                )
            except Exception as problem:
                print(f"{name} failed: {type(problem).__name__}: {problem}", file=out, flush=True)
            print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
            if asked.device != "cpu":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
