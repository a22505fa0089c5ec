"""A whole forget in a federation of small devices: all who stay are asked, or some of them.

    python benchmarks/thousand_devices.py

A network of one hidden layer on ten classes of Gaussian inputs, 20 samples a device, 100 devices a round, by FedAvg.
Told are seconds, megabytes, and how far the step of those who were asked is from the step of all.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
from torch import Tensor, nn

import expunge
from expunge import Memory
from expunge.unlearning.registry import Outcome

Devices = dict[str, tuple[Tensor, Tensor]]
SAMPLES, DRAWN, ROUNDS, RATE, BATCH = 20, 100, 10, 0.1, 10


def main() -> None:
    """Print a line for each number of devices that are asked."""
    parser = argparse.ArgumentParser(description="A forget among many small devices.")
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--asked", type=int, nargs="+", default=[200, 50])
    options = parser.parse_args()
    torch.manual_seed(0)
    devices = _devices(options.devices)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    memory = _trained(model, devices)
    gone = memory.clients[0]
    stay = [name for name in devices if name != gone]
    whole: Tensor | None = None
    print("  asked  seconds  MB down  MB up  apart  cosine")
    for count in (len(stay), *options.asked):
        chosen = {stay[at]: devices[stay[at]] for at in torch.randperm(len(stay))[:count].tolist()}
        started = time.perf_counter()
        outcome = expunge.forget(
            model, chosen, gone, memory=memory, batch_size=BATCH, progress=False, missing="leave-out"
        )
        seconds, step = time.perf_counter() - started, _step(model, outcome)
        whole = step if whole is None else whole
        apart = float((step - whole).norm() / whole.norm())
        cosine = float(torch.cosine_similarity(step, whole, dim=0))
        down, up = outcome.cost.bytes_down / 1e6, outcome.cost.bytes_up / 1e6
        print(f"{count:>7,} {seconds:>8.1f} {down:>8.1f} {up:>6.1f} {apart:>6.1%} {cosine:>7.4f}", flush=True)


def _devices(count: int) -> Devices:
    """Samples of each device, around one centre for each class."""
    centres, found = 1.2 * torch.randn(10, 64), {}
    for number in range(count):
        targets = torch.randint(0, 10, (SAMPLES,))
        found[f"device-{number}"] = (centres[targets] + torch.randn(SAMPLES, 64), targets)
    return found


def _trained(model: nn.Module, devices: Devices) -> Memory:
    """FedAvg, in place."""
    memory, names = Memory(model), list(devices)
    for _ in range(ROUNDS):
        chosen = [names[at] for at in torch.randperm(len(names))[:DRAWN].tolist()]
        updates = {name: _update(model, *devices[name]) for name in chosen}
        memory.record(updates, dict.fromkeys(chosen, SAMPLES), learning_rate=RATE, steps=SAMPLES // BATCH)
        with torch.no_grad():
            for key, own in model.named_parameters():
                own += torch.stack([update[key] for update in updates.values()]).mean(dim=0)
    return memory


def _update(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    optimiser = torch.optim.SGD(own.parameters(), lr=RATE)
    for batch in torch.split(torch.arange(SAMPLES), BATCH):
        optimiser.zero_grad()
        nn.functional.cross_entropy(own(inputs[batch]), targets[batch]).backward()
        optimiser.step()
    before = dict(model.named_parameters())
    return {key: after.detach() - before[key].detach() for key, after in own.named_parameters()}


def _step(model: nn.Module, outcome: Outcome) -> Tensor:
    before = torch.cat([own.detach().reshape(-1) for own in model.parameters()])
    return outcome.state.model.parameters - before


if __name__ == "__main__":
    main()
