"""Kill -9 while requests are worked on, and see that `resume` ends what was begun: once, whole, with nothing left.

Each try is a fork of this process on a copy of one folder, and runs the real commands.

    python dying.py FOLDER events            before and after every event
    python dying.py FOLDER operations STEP   before every STEP-th file operation
    python dying.py FOLDER random COUNT      at random moments
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from expunge import cli
from expunge.ledger.receipt import verify
from killing import OPERATIONS, killed
from ledger.places import FILE, Place

LEAVERS = ("bob", "cyd")
ONCE = ("running", "forgotten", "overridden", "adopted", "erased", "told", "receipt", "closed")


class Dying:
    """A federation with two requests, worked on by somebody who dies.

    Args:
        folder: where the federation and its copies go.
        digits: handwritten digits in the place of made-up numbers.
    """

    def __init__(self, folder: Path, digits: bool = False) -> None:
        torch.set_num_threads(1)
        folder.mkdir(exist_ok=True)
        if digits:
            (folder / "pristine").mkdir()
            (folder / "pristine" / "federation.py").write_text(digits_file())
        self.pristine = Place(folder / "pristine")
        if digits:
            from expunge.ledger.ledger import Ledger

            Ledger.create(self.pristine.folder / "ledger", "the desk")
            self.pristine.federation.train()
        state = self.pristine.federation.state_store().load(self.pristine.federation.model())
        self.before = state.model
        self.vectors = [state.memory.vectors[name] for name in LEAVERS]
        for name in LEAVERS:
            self.pristine.ask(name)
        self.folder = folder / "copy"

    def fresh(self) -> None:
        self.place = self.pristine.copy(self.folder)
        os.chdir(self.folder)

    def command(self) -> None:
        """Everything that an operator does, from the first request to the last receipt."""
        run("request", "run", "R-0001", "R-0002", "--method", "fine-tuning", "--override", "a test needs no audit")
        self.close()

    def close(self) -> None:
        for number in ("R-0001", "R-0002"):
            run("request", "close", number, "--told-all")

    def finish(self) -> None:
        """What the operator does the day after."""
        self.require_whole()
        run("request", "resume")
        self.command()

    def require_whole(self) -> None:
        """The log can be read, and the current model is one whole checkpoint that an event knows."""
        place = self.place
        events = place.ledger.events()
        models = {self.before.digest}
        models |= {event.content["models"]["after"] for event in events if event.kind == "forgotten"}
        store = place.federation.state_store()
        assert store.load(place.federation.model()).model.digest in models

    def check(self) -> None:
        """All ended, each step done once, the log and the receipts verify, and nothing of the leavers is left."""
        ledger = self.place.ledger
        assert {case.state for case in ledger.cases().values()} == {"closed"}
        for case in ledger.cases().values():
            steps = Counter(event.kind for event in case.events)
            assert {kind: steps[kind] for kind in ONCE} == dict.fromkeys(ONCE, 1), steps
            folder = ledger.folder
            verify(folder / "receipts" / f"{case.number}.intoto.jsonl", folder / "key.pub", folder / "log.jsonl")
        store = self.place.federation.state_store()
        assert set(store.book.departed) == set(LEAVERS)
        assert store.book.pending is None
        new = store.load(self.place.federation.model()).model.parameters
        last = ledger.case("R-0002").facts["forgotten"]["models"]["after"]
        assert store.load(self.place.federation.model()).model.digest == last
        old = self.before.parameters
        parts = [*self.vectors, old, old - new, new - old]
        kinds = (torch.float32, torch.float64, torch.bfloat16)
        traces = [part.to(kind).view(torch.uint8).numpy().tobytes() for part in parts for kind in kinds]
        for file in self.place.files():
            content = file.read_bytes()
            assert not any(trace in content for trace in traces), file
            assert not file.name.startswith(".staging"), file

    def tried(self, die: Callable[[], bool]) -> bool:
        """One try: whether it died at all."""
        self.fresh()
        died = die()
        if died:
            self.finish()
        self.check()
        return died


def digits_file() -> str:
    """A federation of four on handwritten digits."""
    own = """
def clients():
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    return {name: (inputs[n::40], labels[n::40]) for n, name in enumerate(NAMES)}


"""
    text = FILE.replace("EXTRA", "").replace("nn.Linear(6, 3)", "nn.Linear(64, 10)")
    head, _, rest = text.partition("def samples")
    return head.rstrip() + "\n\n" + own + rest[rest.index("NAMES = ") :]


def run(*words: str) -> None:
    """The real entry point."""
    sys.argv, code = ["expunge", *words], None
    try:
        cli.main()
    except SystemExit as left:
        code = left.code
    assert not code, words


def events(dying: Dying) -> int:
    """Die before the n-th event is written, and right after; for every n."""
    deaths = number = 0
    while True:
        number += 1
        ways = [partial(killed_at_event, dying.command, number, later) for later in (False, True)]
        before, after = map(dying.tried, ways)
        deaths += before + after
        if not before and not after:
            return deaths


def killed_at_event(work: Callable[[], object], number: int, after: bool) -> bool:
    """Do the work in a fork that dies at its n-th event; whether it did."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event not in OPERATIONS:
                return
            if seen == number and after:
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "open" and str(arguments[0]).endswith("log.jsonl") and appends(arguments[2]):
                seen += 1
                if seen == number and not after:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


def appends(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & os.O_APPEND)


def operations(dying: Dying, step: int) -> int:
    deaths, number = 0, 1
    while dying.tried(partial(killed, dying.command, number)):
        deaths, number = deaths + 1, number + step
    return deaths


def at_random(dying: Dying, count: int) -> int:
    """Between the start of the command and a little after its end."""
    chance, deaths = random.Random(20), 0
    dying.fresh()
    began = time.perf_counter()
    killed(dying.command, before=10**9)
    longest = time.perf_counter() - began
    for _ in range(count):
        deaths += dying.tried(partial(killed_after, dying.command, chance.uniform(0, longest)))
    return deaths


def killed_after(work: Callable[[], object], seconds: float) -> bool:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(place: str, how: str, number: str = "1", data: str = "") -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the commands say to people
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    dying = Dying(Path(place).resolve(), digits=data == "digits")
    ways = {"events": events, "operations": lambda own: operations(own, int(number))}
    deaths = ways[how](dying) if how in ways else at_random(dying, int(number))
    os.write(out, json.dumps({"deaths": deaths}).encode() + b"\n")


if __name__ == "__main__":
    given = sys.argv[1:]
    said = os.fdopen(os.dup(2), "w")
    try:
        main(*given)
    except BaseException:
        traceback.print_exc(file=said)
        raise
