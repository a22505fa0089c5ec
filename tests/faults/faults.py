"""Planned kills: who dies, how, in which message round and how many seconds into it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expunge.federation.keeping.journal import Journal
from flower_deployment.deployment import Deployment

GREETED = "Receiving: query.expunge_hello"
ASKED = "Receiving: query.expunge_task"

WAYS = ("the whole site", "its SuperNode only", "its ClientApp only")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a site.

    Attributes:
        site: who dies.
        way: the whole site at once (a power failure), or one process of it (the kernel's choice when memory is short).
        after: so many finished message rounds; -1 while the sites are being greeted, before the first.
        delay: seconds after the site has received a message of that round.
    """

    site: str
    way: str
    after: int
    delay: float


def random_kills(count: int, rounds: int, sites: Sequence[str], seed: int) -> list[Kill]:
    """Kills at random moments of a request with so many message rounds, always the same for a seed."""
    chance = random.Random(seed)
    moments = chance.sample([(after, site) for after in range(rounds) for site in sites], count)
    return [Kill(site, chance.choice(WAYS[:2]), after, chance.uniform(0.0, 3.0)) for after, site in sorted(moments)]


class Killer:
    """Carries out kills, in order, while a request is being worked on; use it in a ``with`` block.

    Args:
        deployment: whose sites are to be killed.
        store: where the request's journal grows by a file with every finished round.
        kills: what to do.
    """

    def __init__(self, deployment: Deployment, store: Path, kills: Sequence[Kill]) -> None:
        self.done: list[Kill] = []
        self._deployment, self._kills, self._journal = deployment, kills, Journal(store / "journal")
        self._over = threading.Event()
        self._marks = {name: _size(deployment.log_of(name)) for name in deployment.sites}
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        for kill in self._kills:
            while len(self._journal) < kill.after:
                if self._over.wait(0.1):
                    return
            words = GREETED if kill.after < 0 else ASKED
            before = self._said(kill.site, words) if kill.after > 0 else 0
            patience = time.monotonic() + 10.0  # where it has received the message before we looked, now will do
            while self._said(kill.site, words) <= before and (kill.after <= 0 or time.monotonic() < patience):
                if self._over.wait(0.1):
                    return
            if self._over.wait(kill.delay):
                return
            if self._strike(kill):
                self.done.append(kill)
                moment = f"in message round {len(self._journal) + 1}" if kill.after >= 0 else "when it was greeted"
                print(f"    killed {kill.site}, {kill.way}, {moment}", flush=True)

    def _strike(self, kill: Kill) -> bool:
        site = self._deployment.sites[kill.site]
        if not site.program.running:  # still down from an earlier kill: nobody is there to be killed
            return False
        if kill.way == "the whole site":
            site.kill()
            return True
        victims = [site.program.pid] if kill.way == "its SuperNode only" else client_apps(site.program.pid)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        return bool(victims)

    def _said(self, name: str, words: str) -> int:
        log = self._deployment.log_of(name)
        return log.read_bytes()[self._marks[name] :].count(words.encode())


def wait_for_rounds(store: Path, rounds: int, seconds: float) -> None:
    """Wait until a request has finished so many message rounds."""
    journal, end = Journal(store / "journal"), time.monotonic() + seconds
    while len(journal) < rounds:
        assert time.monotonic() < end, f"round {rounds} did not end within {seconds:.0f} s"
        time.sleep(0.05)


def client_apps(group: int) -> list[int]:
    """Process ids of the ClientApps in a SuperNode's process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (process / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            if int(its_group) == group and state != "Z" and b"flwr-clientapp" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0
