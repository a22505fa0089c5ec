"""A run folder, opened for a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from expunge.cli.arguments import torch_device
from expunge.errors import RequestError

if TYPE_CHECKING:
    from expunge.bench.run_folder import RunFolder
    from expunge.bench.scenario import Federation, Scenario
    from expunge.unlearning.request import Request


def built(scenario: Scenario, data_dir: Path | None, device: str, *, download: bool = False) -> Federation:
    """Load the data of a scenario; on images of 8x8 pixels a second thread costs more than it brings."""
    import torch

    if scenario.dataset == "digits":
        torch.set_num_threads(1)
    return scenario.build(data_dir, download=download, device=torch_device(device))


def tried_requests(folder: RunFolder) -> dict[str, Request]:
    """What was tried in a run; refused where there is nothing."""
    found = folder.requests()
    if found:
        return found
    if folder.departed:
        raise RequestError(f"{', '.join(folder.departed)} left for good, and nothing else was tried in {folder.path}.")
    raise RequestError(
        f"Nothing was forgotten in {folder.path} yet: try `expunge forget {folder.path} --client client-0`."
    )
