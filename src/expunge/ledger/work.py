"""The work on requests: forget, look at the result, let the federation go on with it, destroy what remembers.

    accepted --begin--> running --forget--> forgotten --judge--> audited --adopt--> ... --erase-->

Each step ends with one event, and can be done again until that is written: the new model stands whole in the workplace
before the log names it, and the store goes over to it in one move. So a crash at any moment leaves work that the next
run takes up where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from expunge.errors import RequestError, SiteError
from expunge.federation.keeping.files import remove
from expunge.ledger import desk
from expunge.ledger.cases import Case
from expunge.ledger.erasure import CUT_OFF, adopt, erase, has_gone_back, roll_back
from expunge.ledger.federation import Federation
from expunge.ledger.job import TRAINED_ON, Job, Reach
from expunge.ledger.judging import Judge
from expunge.ledger.ledger import Ledger
from expunge.ledger.making import Settings, begin, forget
from expunge.ledger.watching import Watch
from expunge.unlearning.registry import method as registered

LONGEST_REASON = 500
"""Characters of an override's reason."""


AWAY = "The clients are in a Flower deployment: run its ServerApp, which calls expunge.flower.work(grid, FILE)."


class Work:
    """Works on requests, one process at a time.

    Args:
        ledger: where they stand.
        federation: what they are about.
        settings: how.
        reach: makes the engine; by default the clients are in this process.
        watch: told how far it is.
    """

    def __init__(
        self,
        ledger: Ledger,
        federation: Federation,
        settings: Settings | None = None,
        reach: Reach | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._ledger, self._federation = ledger, federation
        self._settings = settings or Settings()
        self._reach = reach or (lambda store, _: federation.engine(store.book.departed))
        self._near = reach is not None or federation.clients is not None
        self._watch = watch or Watch(ledger)
        registered(self._settings.method).configured(self._settings.options)

    def run(self, numbers: Sequence[str] = (), *, together: bool = False) -> list[str]:
        """Finish what is unfinished, then work on these requests, or on all that are accepted, the first due first.

        Args:
            numbers: requests; those that failed or need another method are begun again.
            together: in one step, not one after another.

        Returns:
            A sentence for each request that could not be begun.
        """
        problems = []
        for number in numbers:
            self._ledger.case(number)  # before any work
        with self._ledger.working() as place:
            touched = self._go_on(place, numbers)
            asked = [self._ledger.case(number) for number in dict.fromkeys(numbers)]
            ended = [case for case in asked if not case.is_open]
            self._ledger.notes += [f"{case.number} is {case.state}: there is nothing left to do." for case in ended]
            chosen = [case for case in asked if case.is_open]
            chosen = [case for case in chosen if case.number not in touched and not case.adopted]
            if not numbers:
                waiting = [case for case in self._ledger.cases().values() if case.state == "accepted"]
                chosen = sorted(waiting, key=lambda case: (case.due, case.number))
            groups = [tuple(case.number for case in chosen)] if together else [(case.number,) for case in chosen]
            for group in filter(None, groups):
                try:
                    for number in group:
                        self._ledger.case(number).require("running")
                    if not self._near:
                        raise RequestError(AWAY)
                    begin(self._job(place, group), self._settings)
                    self._go_on(place, group)
                except (RequestError, SiteError) as problem:
                    problems.append(f"{', '.join(group)}: {problem}")
        return problems

    def resume(self) -> list[str]:
        """Finish what is unfinished, and destroy what has waited long enough; the requests that it was about."""
        with self._ledger.working() as place:
            return self._go_on(place)

    def roll_back(self, number: str, reason: str) -> None:
        """Let the federation go back to the old model, while that is still kept."""
        desk.require_text(reason, "The reason")
        with self._ledger.working() as place:
            case = self._ledger.case(number)
            case.require("rolled-back")
            roll_back(self._job(place, case.facts["running"]["together"]), reason)

    def _job(self, place: Path, numbers: Sequence[str]) -> Job:
        return Job(self._ledger, self._federation, self._reach, self._watch, place, tuple(numbers))

    def _go_on(self, place: Path, named: Sequence[str] = ()) -> list[str]:
        """Take up every piece of work where it is, as far as it can go now; named requests may be overridden."""
        touched: list[str] = []
        self._tidy(place)
        for case in list(self._ledger.cases().values()):
            if not case.is_open or "running" not in case.facts or case.number in touched:
                continue
            job = self._job(place, case.facts["running"]["together"])
            while self._step(job, named=not set(job.numbers).isdisjoint(named)):
                touched = list(dict.fromkeys([*touched, *job.numbers]))
        self._watch.over()
        return touched

    def _tidy(self, place: Path) -> None:
        """Delete models in the workplace that no open request's last run knows."""
        runs = {case.run[:16] for case in self._ledger.cases().values() if case.is_open and "running" in case.facts}
        for found in (*place.glob("candidate-*"), *place.glob("superseded-*")):
            if found.name.partition("-")[2] not in runs:
                remove(found)

    def _step(self, job: Job, *, named: bool) -> bool:
        """One step, which is one event; False where nothing can be done now."""
        case, head = job.case, self._ledger.head().number
        waits = case.state in ("forgotten", "audited", "retrain-needed") and not case.gate
        if case.state == "running" and self._near:
            forget(job)
        elif self._settings.override and named and waits:
            self._override(job)
        elif case.state == "forgotten":
            self._judge(job)
        elif case.state == "audited" and case.gate and not case.adopted:
            adopt(job)
        elif case.adopted and not case.erased and has_gone_back(job):
            roll_back(job, CUT_OFF)
        elif is_over(case, self._ledger.clock()):
            erase(job)
        return self._ledger.head().number != head

    def _judge(self, job: Job) -> None:
        """What an audit says; where nothing can be asked, it stays with the person."""
        model, running = self._federation.model(), job.case.facts["running"]
        before = self._federation.state_store().load(model).model
        if before.digest != running["models"]["before"]:
            job.fail(TRAINED_ON)
            return
        judge = Judge(self._federation, job.request(), job.place, self._watch.of(job.numbers))
        file = self._ledger.folder / "audits" / f"{job.numbers[0]}.json"
        found = judge.judge(before, job.candidate.load(model).model, running["retrains"], file)
        if found is not None:
            self._ledger.record("audited", job.numbers, found)

    def _override(self, job: Job) -> None:
        reason = self._settings.override
        if any(name in reason for name in job.request().clients):
            raise RequestError("The reason of an override stands in the receipt: leave the client's name out of it.")
        if len(reason) > LONGEST_REASON:
            raise RequestError(f"The reason of an override stands in the receipt: at most {LONGEST_REASON} characters.")
        self._ledger.record("overridden", job.numbers, {"reason": reason})


def is_over(case: Case, now: datetime) -> bool:
    """Whether the old model is to be destroyed: at once, or when its time is over; a clock that is behind waits."""
    if not case.adopted or case.erased:
        return False
    grace = timedelta(seconds=case.facts["running"]["grace"])
    adopted = next(event for event in reversed(case.events) if event.kind == "adopted")
    return not grace or now >= datetime.fromisoformat(adopted.time) + grace
