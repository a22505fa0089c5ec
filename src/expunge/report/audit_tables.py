"""The tables of an audit's page: every measure, every attack, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from expunge.auditing import words
from expunge.auditing.comparison import Comparison
from expunge.auditing.evidence import Evidence
from expunge.auditing.intervals import Interval
from expunge.auditing.margins import Finding
from expunge.auditing.membership import Attack
from expunge.report.audit_text import margin_text, mean_auc, mean_tpr, range_text
from expunge.report.measures import MISSING
from expunge.report.pieces import HtmlLine, html_table

_UNMARKED = "Without a mark: doing nothing has no gap either, so having none shows nothing."
_LEANINGS = {"for": "speaks for forgetting", "against": "speaks against forgetting", "neither": "says neither"}


def findings_table(findings: Sequence[Finding]) -> str:
    """A line a measure: the model, the retrained ones, what passes, doing nothing, and what came out."""
    lines = []
    for one in words.in_order(findings):
        show, share = one.measure.shown, words.left(one)
        cells = [
            _value(one),
            show(one.retrained),
            _cell(margin_text(one), "" if share is None else f"margin {min(share.margin, 9.99):.0%}"),
            show(one.trained),
            MISSING if share is None or not one.usable else f"{share.share:.0%}",
            words.outcome(one),
        ]
        lines.append(HtmlLine(one.measure.label, cells))
    headers = ["measure", "value", "retrained", "what passes", "doing nothing", "still there", "outcome"]
    return html_table(headers, lines, card=True)


def _value(one: Finding) -> str:
    """Coloured where it says something: outside a margin, or within one that can carry a claim."""
    text = one.measure.shown(one.value)
    if one.outcome == "outside":
        return _judged(text, near=False)
    return _judged(text, near=True) if one.usable and one.outcome == "within" else escape(text)


def attacks_table(attacks: dict[str, Comparison]) -> str:
    """What each attack reaches on the trained, the judged and the retrained models."""
    lines = []
    for attack, found in attacks.items():
        lines.append(HtmlLine(f"{attack}: AUC", _auc_cells(found)))
        lines.append(HtmlLine(f"{attack}: TPR at 1% FPR", _tpr_cells(found)))
    table = html_table(["attack", "trained", "this model", "retrained", "gap"], lines, card=True)
    return "<h2>Membership attacks</h2>" + table + note(_UNMARKED)


def _auc_cells(found: Comparison) -> list[str]:
    values = [attack.auc.value for attack in found.retrained]
    return [
        _cell(*range_text(found.trained.auc)),
        _cell(*range_text(found.unlearned.auc)),
        _cell(f"{mean_auc(found.retrained):.3f}", f"{min(values):.3f} to {max(values):.3f}"),
        _gap(found.gap.auc, found.do_nothing.auc, percent=False),
    ]


def _tpr_cells(found: Comparison) -> list[str]:
    return [
        _rate(found.trained),
        _rate(found.unlearned),
        _cell(mean_tpr(found.retrained)),
        _gap(found.gap.tpr_at_1_percent, found.do_nothing.tpr_at_1_percent, percent=True),
    ]


def _rate(attack: Attack) -> str:
    rate = attack.tpr_at_1_percent
    return MISSING if rate is None else _cell(*range_text(rate, percent=True))


def _gap(gap: Interval | None, before: Interval | None, percent: bool) -> str:
    """Coloured where doing nothing has a gap: otherwise having none shows nothing."""
    if gap is None:
        return MISSING
    value, limits = range_text(gap, percent, sign=True)
    if gap.covers(0) and (before is None or before.covers(0)):
        return _cell(value, limits)
    return _judged(value, gap.covers(0)) + f"<small>{limits}</small>"


def evidence_list(evidence: Sequence[Evidence]) -> str:
    """What can be said without retrained models."""
    kinds = {"for": "near", "against": "far", "neither": ""}
    items = "".join(
        f'<li><span class="{kinds[found.leaning]}">{escape(found.what)} {_LEANINGS[found.leaning]}</span>:'
        f" {escape(found.sentence)}</li>"
        for found in evidence
    )
    return f'<div class="card"><ul>{items}</ul></div>' if items else note("None was gathered.")


def note(text: str) -> str:
    """A sentence in small letters."""
    return f'<p class="note">{escape(text)}</p>'


def _judged(text: str, near: bool) -> str:
    return f'<span class="{"near" if near else "far"}">{escape(text)}</span>'


def _cell(text: str, below: str = "") -> str:
    return escape(text) + (f"<small>{escape(below)}</small>" if below else "")
