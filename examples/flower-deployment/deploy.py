"""A whole federation on this machine: train, switch a site off, forget it, compare with training again without it.

    python deploy.py --out runs/flower

SuperLink with TLS and SuperNode authentication and four hospitals as SuperNodes, each a process of its own, all on
loopback; the app they run is ../flower-app. Keys, certificates and the database live in a temporary folder. Everything
that was started is stopped at the end, also after an error or Ctrl-C.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from expunge.errors import ExpungeError, RequestError
from expunge.federation.keeping.state_store import StateStore
from expunge.progress import progress_bars
from expunge.unlearning.registry import method

HERE = Path(__file__).resolve().parent
APP = HERE.parent / "flower-app"
sys.path[:0] = [str(HERE), str(APP)]

from flower_app.task import ATTACKER, Net, load_data, test  # noqa: E402
from flower_deployment.deployment import Deployment  # noqa: E402

SITES = {
    f"hospital-{number + 1}": {"name": f"hospital-{number + 1}", "partition-id": number, "num-partitions": 4}
    for number in range(4)
}
TRAINING = {"num-server-rounds": 8, "local-epochs": 5}
FORGETTING = {"forget": ATTACKER, "method": "retrace", "deadline": 300.0}
LIMIT = 900.0
"""Seconds that one run may take."""

COLUMNS = {
    "accuracy": "accuracy",
    "backdoor": "backdoor works",
    "leaver": "on its own data",
    "rounds": "message rounds",
    "seconds": "seconds",
    "megabytes": "MB sent",
}


def main() -> None:
    """Run the demonstration; its numbers go to OUT/results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/flower"), help="where results.json goes")
    out = parser.parse_args().out
    for number in (signal.SIGINT, signal.SIGTERM):  # an exit like any other: everything that was started is stopped
        signal.signal(number, lambda *_: sys.exit("stopped, and so is everything that was started"))
    console, began = Console(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="expunge-flower-"))
    keep = False
    try:
        rows = demonstrate(folder, console)
    except Exception as problem:
        keep = True
        if isinstance(problem, ExpungeError):
            sys.exit(f"error: {problem} (logs are in {folder})")
        console.print(f"Logs are in {folder}.")
        raise
    finally:
        if not keep:
            shutil.rmtree(folder)  # private keys, and SuperLink's database with what sites have sent
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    console.print(table_of(rows))
    console.print(f"{time.monotonic() - began:.0f} s in all; the numbers are in {out / 'results.json'}")


def demonstrate(folder: Path, console: Console) -> dict[str, dict[str, float]]:
    """Train, forget and train again; what came of each."""
    stores = {name: folder / f"{name}-store" for name in ("trained", "retrained")}
    rows = {}
    console.print(f"Starting SuperLink and {len(SITES)} SuperNodes, with TLS and keys made just now ...")
    with Deployment(folder / "deployment", SITES) as deployment, progress_bars(console) as progress:

        def run(what: str, total: int, config: dict[str, Any]) -> float:
            """One run of the app, to its end."""
            done = deployment.run(
                APP, config, deadline=LIMIT, on_line=rounds_in(lambda count: progress(what, count, max(count, total)))
            )
            if not done.completed:
                raise RequestError(f"{what} ended as {done.status}: {reason_in(done.log)}")
            return done.seconds

        training = TRAINING | {"store": str(stores["trained"])}
        seconds = run("training", TRAINING["num-server-rounds"], training)
        rows["trained"] = judged(stores["trained"], seconds, TRAINING["num-server-rounds"], sites=len(SITES))
        console.print(f"Trained in {seconds:.0f} s. Now {ATTACKER} is switched off, and asks to be forgotten ...")
        deployment.switch_off(ATTACKER)
        seconds = run(
            "forgetting",
            method(FORGETTING["method"]).options.expected_rounds,
            FORGETTING | {"store": str(stores["trained"])},
        )
        rows["forgotten"] = judged(stores["trained"], seconds)
        console.print(f"Forgotten in {seconds:.0f} s. For comparison, the others train again without it ...")
        seconds = run("training again", TRAINING["num-server-rounds"], training | {"store": str(stores["retrained"])})
        rows["retrained"] = judged(stores["retrained"], seconds, TRAINING["num-server-rounds"], sites=len(SITES) - 1)
    return rows


def rounds_in(tell: Callable[[int], None]) -> Callable[[str], None]:
    """A reader of log lines that counts the rounds it sees go by."""
    seen: list[str] = []

    def read(line: str) -> None:
        if "[ROUND" in line or "message round" in line:
            seen.append(line)
            tell(len(seen))

    return read


def reason_in(log: str) -> str:
    """The last line of a log that says something: where an exception ended the run, its sentence."""
    said = [line.strip() for line in log.splitlines() if "Error" in line]
    return said[-1] if said else "its log says nothing."


def judged(store: Path, seconds: float, rounds: int = 0, sites: int = 0) -> dict[str, float]:
    """How good the model in a store is, and what it took; a forget has written its own cost there."""
    model, kept = Net(), StateStore(store)
    state = kept.load(model)
    state.model.write_to(model)
    images, labels = load_data(ATTACKER, SITES[ATTACKER]["partition-id"], SITES[ATTACKER]["num-partitions"])
    with torch.no_grad():
        leaver = (model(images).argmax(dim=1) == labels).float().mean().item()
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    cost = {"rounds": rounds, "bytes": 2 * rounds * sites * size}  # a round of FedAvg: the model to all, and back
    if not rounds:
        spent = kept.book.forgotten[-1]["cost"]
        cost = {"rounds": spent["rounds"], "bytes": spent["bytes_down"] + spent["bytes_up"]}
    return test(model) | {
        "leaver": leaver,
        "rounds": cost["rounds"],
        "seconds": seconds,
        "megabytes": cost["bytes"] / 1e6,
    }


def table_of(rows: dict[str, dict[str, float]]) -> Table:
    """The comparison."""
    table = Table(title=f"{ATTACKER}, forgotten after it was switched off")
    for name in ("", *COLUMNS.values()):
        table.add_column(name, justify="right" if name else "left")
    for name, row in rows.items():
        shown = [f"{row[key]:.1%}" for key in ("accuracy", "backdoor", "leaver")]
        table.add_row(name, *shown, f"{row['rounds']:.0f}", f"{row['seconds']:.0f}", f"{row['megabytes']:.2f}")
    return table


if __name__ == "__main__":
    main()
