"""A piece of work with several rounds, to be killed.

python worked.py FOLDER [asking|writing|written NUMBER]      dies by kill -9 in that round, at that moment
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.federation.engines.engine import Cost, Engine
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping import files
from expunge.federation.keeping.journal import Journal, JournaledEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import TrainingPlan
from expunge.unlearning.request import Request
from federation.small import clients, mlp
from unlearning.presets import KRYLOV, forgotten

DATA = clients(ada=20, bob=12, cyd=16)
MODEL = Snapshot.of(mlp())


def local_engine() -> LocalEngine:
    return LocalEngine(mlp(), CrossEntropy(), DATA)


def trained() -> ServerState:
    return train(local_engine(), MODEL, TrainingPlan(rounds=2, epochs=1, batch_size=8, learning_rate=0.1))


def forget(engine: Engine, options: object, request: Request | None = None) -> tuple[Tensor, Cost]:
    """The model that is left, and what it cost."""
    outcome = forgotten(engine, trained(), request or Request.of("cyd"), options)
    assert outcome.succeeded
    return outcome.state.model.parameters, outcome.cost


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, moment: str = "", number: int = -1) -> None:
    journal = Journal(folder / "journal")
    engine: Any = local_engine()
    ask, write, to_disk = engine.ask, journal.write, files.to_disk

    def asking(tasks: Any) -> Any:
        replies = ask(tasks)
        if moment == "asking" and len(journal) == number:
            die()
        return replies

    def writing(path: Path) -> None:
        if moment == "writing" and path.name == f"{number:04}.safetensors":
            path.write_bytes(path.read_bytes()[:-5])  # what the disk may hold when the machine stops
            die()
        to_disk(path)

    def written(this: int, finished: Any) -> None:
        write(this, finished)
        if moment == "written" and this == number:
            die()

    engine.ask, journal.write, files.to_disk = asking, written, writing  # type: ignore[method-assign]
    parameters, cost = forget(JournaledEngine(engine, journal), KRYLOV)
    save_file({"parameters": parameters}, folder / "outcome.safetensors")
    (folder / "cost.json").write_text(json.dumps(cost.as_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3], *map(int, sys.argv[3:4]))
