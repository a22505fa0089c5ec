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
from expunge.federation.keeping.state import ServerState
from expunge.ledger.receipt import verify
from killing import OPERATIONS, killed
from ledger.places import FILE, Place
from traces import Traces, remembering

LEAVERS = ("bob", "cyd")
STORED = {"model.safetensors", "memory.safetensors", "vectors", "checkpoints.safetensors"}
SPARSE = (
    FILE.replace("EXTRA", "")
    .replace('"dee")', '"dee", "eve", "fay")')
    .replace("rounds=2,", "rounds=2, participation=0.5, seed=2,")
)
"""Bob trains with dee and fay in one round, cyd with ada and eve in the other."""

COMPLAINTS = os.dup(2)  # what the commands say to people is not shown, what is wrong here is
ONCE = ("running", "forgotten", "overridden", "adopted", "erased", "told", "receipt", "closed")


class Dying:
    """A federation with two requests, worked on by somebody who dies.

    Args:
        folder: where the federation and its copies go.
        data: "digits" for handwritten digits in the place of made-up numbers, "sparse" where some never meet.
    """

    def __init__(self, folder: Path, data: str = "") -> None:
        torch.set_num_threads(1)
        folder.mkdir(exist_ok=True)
        text = {"digits": digits_file(), "sparse": SPARSE, "": FILE.replace("EXTRA", "")}[data]
        self.pristine = Place.written(folder / "pristine", text)
        for name in LEAVERS:
            self.pristine.ask(name)
        self.folder = folder / "copy"
        self.states = [self._state(self.pristine)]
        self._look_for_traces()

    def _state(self, place: Place) -> ServerState:
        return place.federation.state_store().load(place.federation.model())

    def _look_for_traces(self) -> None:
        """Do the work once, undisturbed, to know what must be gone; and see that it can be found where it is."""
        self.fresh()
        work = self.folder / "ledger" / "work"
        run("request", "run", "R-0001", "--override", "a test needs no audit", "--grace", "1h")
        start = self.pristine.federation.initial(self.pristine.federation.plan.seed).parameters
        first = Traces(remembering(self.states[0], LEAVERS), start)
        assert first.kinds_in(self.pristine.folder / "store") == STORED
        assert first.kinds_in(work) == STORED, "the copy for going back is not found"
        self.states.append(self._state(self.place))
        old, new = (own.model.parameters for own in self.states)
        gone = [*remembering(self.states[0], LEAVERS), *remembering(self.states[1], LEAVERS[1:]), old - new, new - old]
        self.traces = Traces(gone, start)

    def fresh(self) -> None:
        self.place = self.pristine.copy(self.folder)
        os.chdir(self.folder)

    def command(self) -> None:
        """Everything that an operator does, from the first request to the last receipt; what is done is not repeated.

        The old model of the second request is kept for a while, then destroyed.
        """
        if "extended" not in self.place.ledger.case("R-0001").facts:
            run("request", "extend", "R-0001", "--reason", "we are few")
        run("request", "run", "R-0001", "--override", "a test needs no audit")
        run("request", "close", "R-0001", "--told-all")
        run("request", "run", "R-0002", "--method", "fine-tuning", "--override", "as before", "--grace", "1s")
        while not self.place.ledger.case("R-0002").erased:
            time.sleep(0.1)
            run("request", "resume")
        run("request", "close", "R-0002", "--told-all")

    def finish(self) -> None:
        """What the operator does the day after."""
        self.require_whole()
        run("request", "resume")
        self.command()

    def require_whole(self) -> None:
        """The log can be read, and the current model is one whole checkpoint that an event knows."""
        place = self.place
        events = place.ledger.events()
        models = {self.states[0].model.digest}
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
            assert set(steps) <= {*ONCE, "received", "accepted", "extended"}, steps
            folder = ledger.folder
            verify(folder / "receipts" / f"{case.number}.intoto.jsonl", folder / "key.pub", folder / "log.jsonl")
        store = self.place.federation.state_store()
        assert set(store.book.departed) == set(LEAVERS)
        assert store.book.pending is None
        new = store.load(self.place.federation.model()).model
        assert new.digest == ledger.case("R-0002").facts["forgotten"]["models"]["after"]
        assert ledger.case("R-0001").facts["forgotten"]["models"]["after"] == self.states[1].model.digest
        steps = [own.model.parameters - new.parameters for own in self.states]
        last = Traces([*steps, *(-step for step in steps)])
        assert not self.traces.found_in(self.folder)
        assert not last.found_in(self.folder)
        assert not [file for file in self.place.files() if file.name.startswith(".staging")]

    def tried(self, *ways: Callable[[], bool]) -> int:
        """One try: how often it died. The next way to die is for who goes on after the one before."""
        self.fresh()
        deaths = 0
        for die in ways:
            if not die():
                break
            deaths += 1
        if deaths:
            self.finish()
        self.check()
        return deaths


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
    """Between the start of the command and a little after its end; every second time, who goes on dies, too."""
    chance, deaths = random.Random(20), 0
    dying.fresh()
    began = time.perf_counter()
    killed(dying.command, before=10**9)
    longest = time.perf_counter() - began
    for number in range(count):
        works = [dying.command, dying.finish][: 1 + number % 2]
        deaths += dying.tried(*(partial(killed_after, work, chance.uniform(0, longest)) for work in works))
    return deaths


def killed_after(work: Callable[[], object], seconds: float) -> bool:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os.write(COMPLAINTS, traceback.format_exc().encode())
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.WIFSIGNALED(status)


def main(place: str, how: str, number: str = "1", data: str = "") -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the commands say to people
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    dying = Dying(Path(place).resolve(), data)
    ways = {"events": events, "operations": lambda own: operations(own, int(number))}
    deaths = ways[how](dying) if how in ways else at_random(dying, int(number))
    os.write(out, json.dumps({"deaths": deaths}).encode() + b"\n")


if __name__ == "__main__":
    given = sys.argv[1:]
    try:
        main(*given)
    except BaseException:
        os.write(COMPLAINTS, traceback.format_exc().encode())
        raise
