"""A certificate: one page in plain words, made from a receipt that is valid. It prints well, and loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from expunge.federation.keeping.files import write_whole
from expunge.ledger.law import in_words
from expunge.ledger.receipt import Receipt, verify

if TYPE_CHECKING:
    from expunge.ledger.ledger import Ledger

_WORDS = {
    "EQUIVALENT": "The model now answers like models that never saw the data, as far as an audit can measure.",
    "SUPPORTED": "What was measured supports that the data is forgotten. It was not compared with retrained models.",
    "UNDECIDED": "An audit was made and could not tell whether the data is forgotten.",
    "NO EVIDENCE": "Nothing that was measured could tell whether the data is forgotten.",
    "UNDER-FORGOTTEN": "The audit found that the model still shows traces of the data.",
    "OVER-FORGOTTEN": "The audit found that the model went too far: it answers unlike models that never saw the data.",
    "DAMAGED": "The audit found that the model has become worse on other data.",
    "NOT SUPPORTED": "What was measured speaks against the data being forgotten.",
}


def write_certificate(ledger: Ledger, number: str) -> None:
    """Write the page of a closed request beside its receipt, without any name."""
    receipts = ledger.folder / "receipts"
    found = verify(receipts / f"{number}.intoto.jsonl", ledger.folder / "key.pub", ledger.folder / "log.jsonl")
    write_whole(receipts / f"{number}.html", page(found))


def summary(found: Receipt) -> list[str]:
    """A receipt in a few lines, for a terminal."""
    said = found.content
    asked, work = said["request"], said["work"]
    return [
        f"VALID: request {asked['number']}, received on {asked['received']}, finished on {asked['finished'][:10]}.",
        f"Forgotten by {work['method']} (expunge {work['expunge']}); model {found.subjects['model'][:16]}"
        f" in the place of {found.subjects['model before'][:16]}.",
        outcome(said),
        f"Deleted: {', '.join(own['what'] for own in said['erasure']['deleted'])}.",
        "Not reached: " + (" ".join(_left(said)) or "nothing was named."),
        f"Recipients told: {said['recipients']['told']} of {said['recipients']['count']}.",
        f"Log: event {said['log']['events']}, {said['log']['hash'][:16]}. {said['limits']}",
    ]


def outcome(said: Mapping[str, Any]) -> str:
    """What was found, in a sentence; an override is told with its reason."""
    audit, override = said["audit"], said["override"]
    text = _WORDS.get(audit["word"], audit["word"]) if audit is not None else "No audit was made."
    if override is not None:
        text += f" The controller went on all the same: “{override['reason']}”."
    return text


def _left(said: Mapping[str, Any]) -> list[str]:
    left = said["erasure"]["left"]
    return left if isinstance(left, list) else ["See the log."]


def _scope(said: Mapping[str, Any]) -> str:
    scope = said["scope"]
    whole = scope["clients"] if isinstance(scope["clients"], int) else len(scope["clients"])
    some = scope["samples"] if isinstance(scope["samples"], int) else sum(own["count"] for own in scope["samples"])
    parts = [f"the whole contribution of {whole} client{'s' * (whole != 1)}"] if whole else []
    parts += [f"{some} single record{'s' * (some != 1)}"] if some else []
    return " and ".join(parts)


def page(found: Receipt, name: str = "") -> str:
    """The page.

    Args:
        found: the receipt, checked.
        name: whose data it was; left out where the page is not for that person.
    """
    said = found.content
    asked, work, told = said["request"], said["work"], said["recipients"]
    late = asked["finished"][:10] > asked["due"]
    rows = {
        "Request": f"{asked['number']}, received on {asked['received']}, due on {asked['due']}"
        + (" (extended)" if asked["extended"] else ""),
        "Ground": in_words(asked["ground"]),
        "Data of": name or f"known by the salted digest {_digests(said)}",
        "What was asked": f"To take {_scope(said)} out of the model.",
        "What was done": f"On {work['begun'][:10]} the contribution was taken out by the method {work['method']}. Since"
        f" {asked['finished'][:10]} the old model is destroyed" + (", which was late." if late else "."),
        "What was found": outcome(said),
        "Deleted": _sentence(", ".join(own["what"] for own in said["erasure"]["deleted"])),
        "Not reached": " ".join(_left(said)) or "Nothing was named.",
        "Others told": f"{told['told']} of {told['count']} that had received the model"
        + (f", the last on {told['last']}." if told["last"] else "."),
    }
    small = {
        "Model before": found.subjects["model before"],
        "Model after": found.subjects["model"],
        "Head of the log": f"event {said['log']['events']}, {said['log']['hash']}",
        "Software": f"expunge {said['expunge']}",
    }
    return _PAGE.format(
        number=escape(asked["number"]),
        tone="" if said["override"] is None else " open",
        rows=_listed(rows),
        small=_listed(small),
        limits=escape(said["limits"]),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _digests(said: Mapping[str, Any]) -> str:
    scope = said["scope"]
    if "digest" in scope:
        return str(scope["digest"])
    digests = [*scope["clients"], *(own["client"] for own in scope["samples"])]
    return ", ".join(digest[:16] + "…" for digest in digests)


def _listed(rows: Mapping[str, str]) -> str:
    return "\n".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in rows.items())


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Certificate of deletion {number}</title>
<style>
:root {{ --paper: #fbfbf9; --card: #fff; --ink: #1d1f21; --soft: #5c6166; --line: #dfe1e3; --mark: #00694d; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #16181a; --card: #1f2225; --ink: #e8e8e6; --soft: #a3a8ad; --line: #35393d; --mark: #58cfa8; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }}
main {{ max-width: 800px; margin: 24px auto; padding: 32px 40px; background: var(--card);
  border: 1px solid var(--line); border-top: 6px solid var(--mark); border-radius: 8px; }}
main.open {{ border-top-color: #b3780e; }}
h1 {{ font-size: 1.6rem; margin: 0 0 4px; }} header p {{ color: var(--soft); margin: 0 0 20px; }}
dl {{ display: grid; grid-template-columns: 9.5em 1fr; gap: 9px 18px; margin: 0; }}
dt {{ font-weight: 600; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
dl.small {{ font-size: 0.78rem; gap: 3px 18px; margin-top: 22px; padding-top: 14px;
  border-top: 1px solid var(--line); }}
dl.small dt {{ font-weight: 400; color: var(--soft); }} dl.small dd {{ font-family: ui-monospace, monospace; }}
footer {{ color: var(--soft); font-size: 0.82rem; margin-top: 18px; }}
footer p {{ margin: 0 0 6px; }} code {{ font-family: ui-monospace, monospace; }}
@media (max-width: 600px) {{ main {{ margin: 0; padding: 22px 18px; border-radius: 0; border-width: 6px 0 1px; }}
  dl {{ grid-template-columns: 1fr; gap: 0; }} dd {{ margin-bottom: 10px; }} dl.small dd {{ margin-bottom: 5px; }} }}
@page {{ size: A4; margin: 14mm; }}
@media print {{ :root {{ --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --mark: #00694d; }}
  body {{ font-size: 10.5pt; }} main {{ max-width: none; margin: 0; padding: 0 0 0; border: 0; }}
  dl {{ grid-template-columns: 9.5em 1fr; gap: 6px 18px; }} dd, dl.small dd {{ margin: 0; }} }}
</style>
</head>
<body>
<main class="certificate{tone}">
<header><h1>Certificate of deletion</h1><p>Request {number}</p></header>
<dl>
{rows}
</dl>
<dl class="small">
{small}
</dl>
<footer>
<p>{limits}</p>
<p>The receipt <code>{number}.intoto.jsonl</code> says this and more, signed; anyone with the issuer's public key can
check it offline: <code>expunge receipt verify {number}.intoto.jsonl --key key.pub</code></p>
</footer>
</main>
</body>
</html>
"""
