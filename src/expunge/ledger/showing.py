"""A ledger for people: what is due, what a request has been through, what to do next; for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from expunge.ledger.cases import Case, tombstones
from expunge.ledger.law import in_words
from expunge.ledger.ledger import Ledger
from expunge.ledger.log import Event
from expunge.ledger.names import Names

if TYPE_CHECKING:
    from rich.table import Table

LONGEST = 60
"""Characters of a name that are shown in a list."""


def overview(ledger: Ledger) -> dict[str, Any]:
    """All requests, the first due first, with who has left and how long the log is."""
    events, names = ledger.events(), ledger.names()
    found, today = ledger.cases(), ledger.clock().date()
    ordered = sorted(found.values(), key=lambda case: (not case.is_open, case.due, case.number))
    requests = [_line(case, names, today) for case in ordered]
    left = [
        {"name": names.text(digest), "digest": digest, "request": number}
        for digest, number in tombstones(events).items()
    ]
    open_ones = [own for own in requests if own["open"]]
    late = sum(own["days"] < 0 for own in open_ones)
    summary = f"{len(open_ones)} open, {late} late, {len(requests) - len(open_ones)} ended; {len(left)} left for good."
    summary += f" The log is whole: {len(events)} events."
    return {
        "requests": requests,
        "tombstones": left,
        "events": len(events),
        "head": events[-1].hash,
        "progress": ledger.progress(),
        "summary": summary,
        "today": str(today),
    }


def details(ledger: Ledger, number: str) -> dict[str, Any]:
    """One request with its events, in words."""
    case, names = ledger.case(number), ledger.names()
    received = case.facts["received"]
    running = case.facts.get("running", {})
    recipients = [
        {"name": names.text(digest), "told": case.told.get(digest)} for digest in running.get("recipients", [])
    ]
    return {
        **_line(case, names, ledger.clock().date()),
        "ground": in_words(received["ground"]),
        "note": names.text(received["note"]) if "note" in received else "",
        "audit": case.facts.get("audited"),
        "recipients": recipients if case.adopted else [],
        "receipt": "receipt" in case.facts,
        "events": [
            {"number": own.number, "time": own.time, "kind": own.kind, "by": names.text(own.by)}
            | {"sentence": sentence(own, names), "hash": own.hash}
            for own in case.events
        ],
    }


def _line(case: Case, names: Names, today: date) -> dict[str, Any]:
    received = case.facts["received"]
    scope = received["scope"]
    samples = [{"client": names.text(own["client"]), "count": own["count"]} for own in scope["samples"]]
    return {
        "number": case.number,
        "state": case.state,
        "open": case.is_open,
        "clients": [names.text(digest) for digest in scope["clients"]],
        "samples": samples,
        "received": received["received"],
        "due": case.due,
        "days": (date.fromisoformat(case.due) - today).days,
        "waits": advice(case),
    }


def sentence(event: Event, names: Names) -> str:
    """An event in one sentence."""
    content, kind = event.content, event.kind
    if kind == "received":
        return f"received on {content['received']}, due on {content['due']}"
    if kind == "accepted":
        return f"accepted; identity checked by {names.text(content['checked_by'])}"
    if kind == "refused":
        legal = f" ({in_words(content['exception'])})" if "exception" in content else ""
        return f"refused: {names.text(content['reason'])}{legal}"
    if kind == "extended":
        return f"extended to {content['due']}: {names.text(content['reason'])}"
    if kind == "running":
        return f"being forgotten by {content['method']} from model {content['models']['before'][:12]}"
    if kind == "forgotten":
        cost = content["cost"]
        spent = f"{cost['seconds']:.1f} s, {cost['rounds']} message round{'s' * (cost['rounds'] != 1)}"
        return f"forgotten by {content['method']} in {spent}: model {content['models']['after'][:12]}"
    if kind == "audited":
        return f"audited: {content['word']}. {content['sentence']}"
    if kind == "told":
        return f"{len(content['recipients'])} recipients told on {content['on']}"
    if kind == "erased":
        return f"the old model and what remembers are destroyed; {len(content['left'])} things were out of reach"
    return _SENTENCES.get(kind, kind) + _because(content, names)


_SENTENCES = {
    "overridden": "the gate was opened without an audit that passed",
    "adopted": "the federation goes on with the new model",
    "rolled-back": "the federation went back to the old model",
    "failed": "failed",
    "receipt": "the receipt is signed",
    "closed": "closed",
}


def _because(content: Mapping[str, Any], names: Names) -> str:
    """The reason of an event: in the log itself, or in the table of names."""
    if "sentence" in content:
        return f": {content['sentence']}"
    reason = str(content.get("reason", ""))
    known = names.text(reason) if len(reason) == 64 else reason
    return f": {known}" if reason else ""


def advice(case: Case) -> str:
    """What a request waits for, in a sentence; empty where it has ended."""
    number = case.number
    if case.state == "received":
        return f"Who asks? `expunge request accept {number} --checked-by NAME`, or refuse."
    if case.state == "accepted":
        return "It can be worked on: `expunge request run`."
    if case.state == "running":
        return "It is being worked on; after a crash: `expunge request resume`."
    if case.state in ("forgotten", "audited") and not case.gate:
        said = "It was not audited" if case.state == "forgotten" else "The audit cannot tell"
        return f"{said}: `expunge request run {number} --override TEXT`, or --retrains 5, or --method retrain."
    if case.state == "retrain-needed":
        return f"The audit is against it: `expunge request run {number} --method retrain --retrains 5`, or override."
    if case.state == "failed":
        return f"`expunge request run {number}` again, with another --method, or refuse."
    if case.adopted and not case.erased and case.state == "audited":
        return f"The old model is kept until {_until(case)}: then `expunge request resume`; before, rollback."
    if case.erased and case.state == "audited":
        return f"Tell the recipients, then `expunge request close {number} --told-all`."
    return "It goes on with `expunge request resume`." if case.is_open else ""


def _until(case: Case) -> str:
    adopted = next(event for event in reversed(case.events) if event.kind == "adopted")
    end = datetime.fromisoformat(adopted.time) + timedelta(seconds=case.facts["running"]["grace"])
    return end.strftime("%Y-%m-%d %H:%M UTC")


def subject(request: Mapping[str, Any]) -> str:
    """Whom a request is about, short.

    Example:
        >>> subject({"clients": ["ada"], "samples": [{"client": "bob", "count": 3}]})
        'ada, 3 samples of bob'
    """
    parts = [f"{own['count']} sample{'s' * (own['count'] != 1)} of {own['client']}" for own in request["samples"]]
    return ", ".join(_short(text) for text in (*request["clients"], *parts))


def days_left(request: Mapping[str, Any]) -> str:
    """The time that is left, in words.

    Example:
        >>> days_left({"open": True, "days": -2}), days_left({"open": True, "days": 1}), days_left({"open": False})
        ('2 days late', '1 day', '')
    """
    if not request["open"]:
        return ""
    days = request["days"]
    return f"{abs(days)} day{'s' * (abs(days) != 1)}{' late' * (days < 0)}"


def overview_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    """The requests for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("request", "about", "state", "due", "left", "waits for"):
        table.add_column(title, overflow="fold")
    for own in requests:
        left = days_left(own)
        style = "bold red" if "late" in left else "yellow" if own["open"] and own["days"] <= 7 else ""
        shown = f"[{style}]{left}[/]" if style else left
        table.add_row(own["number"], escape(subject(own)), own["state"], own["due"], shown, escape(own["waits"]))
    return table


def text_of(found: Mapping[str, Any]) -> str:
    """One request for a terminal."""
    lines = [f"{found['number']}: {subject(found)}; {found['state']}, due on {found['due']} ({found['ground']})"]
    lines += [f"  {own['time'][:19].replace('T', ' ')}  {own['sentence']}" for own in found["events"]]
    told = [own for own in found["recipients"] if own["told"]]
    if found["recipients"]:
        lines.append(f"  recipients: {len(found['recipients'])}, told: {len(told)}")
    return "\n".join([*lines, *([f"  {found['waits']}"] if found["waits"] else [])])


def _short(text: str) -> str:
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
