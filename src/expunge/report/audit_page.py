"""The page of an audit: verdicts first, then why; one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from expunge.auditing.comparison import Comparison
from expunge.auditing.equivalence import Finding
from expunge.auditing.intervals import Interval
from expunge.auditing.membership import Attack
from expunge.auditing.model_audit import ModelAudit
from expunge.auditing.verdict import Verdict
from expunge.bench.auditing import Audit
from expunge.report.audit_plots import audit_figures
from expunge.report.audit_text import (
    EQUIVALENT_MEANS,
    NO_RETRAINS,
    in_order,
    interval_text,
    mean_auc,
    mean_tpr,
    p_text,
    power_sentences,
    range_text,
)
from expunge.report.layout import file_label, method_name, scenario_line
from expunge.report.measures import MISSING
from expunge.report.pictures import figure
from expunge.report.pieces import HtmlLine, definitions, document, html_table, write_page
from expunge.report.verdicts import MEANINGS, mark_of

_TITLE = "Audit: did the model forget?"
_READING = {
    "retrained": "Models trained again from the start without the data. What they show is the goal: no other value is.",
    "doing nothing": "The trained model as it is. Where even this passes, passing shows nothing.",
    "expected of a retrained model": "Where one more retrained model would lie, with all measures taken together.",
    "p": "The chance that a retrained model deviates as much. What counts is decided over all measures together"
    " (Holm), so a value just inside its interval can still be told apart when others are.",
    "AUC": "The chance that a membership attack ranks a forgotten sample above one that nobody trained on; 0.5 is"
    " guessing. On a retrained model it may be another value, since a client's samples are not like others'.",
    "TPR at 1% FPR": "The share of the forgotten samples found when 1% of the others are taken for them by mistake;"
    f" {MISSING} where there are too few samples to say.",
    "gap": "The model's value minus the retrained models' mean, with its 95% interval. Near 0 is good, below 0 is a"
    " trace, too.",
}
_UNMARKED = "Without a mark: doing nothing passes here, too, so passing shows nothing."
_LEANINGS = {"for": "speaks for forgetting", "against": "speaks against forgetting", "neither": "says neither"}


def write_audit(audit: Audit, path: str | Path) -> Path:
    """Write the page of an audit; its folder is made if need be.

    Raises:
        RequestError: the path cannot be written.
    """
    return write_page(render_audit(audit), path)


def render_audit(audit: Audit) -> str:
    """The page as text.

    Example:
        >>> import numpy as np
        >>> from expunge.bench.results import Results
        >>> "No method" in render_audit(Audit(Results("demo", {}, {}, [], {}), {}, None, {}, np.ones(1), ""))
        True
    """
    drawn = audit_figures(audit)
    subtitle = ". ".join(filter(None, (audit.results.experiment, scenario_line(audit.results))))
    cards = "".join(_card(method, own) for method, own in audit.methods.items())
    of = f"The attack is {audit.attack}." if audit.attack else ""
    common = [figure(name, drawn[name], of) for name in ("audit-scores", "audit-roc") if name in drawn]
    sections = [
        f"<header><h1>{escape(_TITLE)}</h1><p>{escape(subtitle)}</p></header>",
        f'<div class="cards verdicts">{cards}</div>' if cards else "<p>No method was tried.</p>",
        *(f'<p class="power">{escape(sentence)}</p>' for sentence in power_sentences(audit)),
        _note(EQUIVALENT_MEANS),
        *(_method(method, own, drawn) for method, own in audit.methods.items()),
        "<h2>Can the forgotten samples be recognised?</h2>",
        *(common or [_note(NO_RETRAINS)]),
        "<h2>Certificate</h2>",
        f"<p>{escape(audit.certificate)}</p>",
        "<h2>Which models</h2>",
        f'<div class="card">{definitions(_provenance(audit), small=True)}</div>',
        "<h2>How to read this</h2>",
        definitions({verdict.value: MEANINGS[verdict.value] for verdict in Verdict} | _READING),
    ]
    return document(_TITLE, sections)


def _provenance(audit: Audit) -> dict[str, str]:
    """When, by which version, and the SHA-256 of every model."""
    known = {method: own.provenance for method, own in audit.methods.items()}
    if not known:
        return {}
    first = next(iter(known.values()))
    retrained = {f"retrained model {number}": digest for number, digest in enumerate(first.retrained, start=1)}
    return {
        "looked at": max(own.date for own in known.values()),
        "expunge": first.version,
        method_name("trained"): first.before,
        **{method_name(method): own.after for method, own in known.items()},
        **retrained,
    }


def _card(method: str, own: ModelAudit) -> str:
    found = own.judgement
    return (
        f'<section class="card result {mark_of(found.verdict)}"><p><a href="#{file_label(method)}">'
        f"{escape(method_name(method))}</a></p>"
        f"<h2>{escape(found.verdict.value)}</h2><p>{escape(found.reason)}</p></section>"
    )


def _method(method: str, own: ModelAudit, drawn: dict[str, Figure]) -> str:
    name = f"audit-verdict-{file_label(method)}"
    return "\n".join(
        [
            f'<section id="{file_label(method)}"><h2 class="variant">{escape(method_name(method))}</h2>',
            figure("audit-verdict", drawn[name]) if name in drawn else "",
            _findings(own.judgement.findings, own.judgement.doing_nothing) if own.judgement.findings else "",
            _attacks(own.attacks) if own.attacks else "",
            "<h2>Evidence without retrained models</h2>",
            _evidence(own),
            "</section>",
        ]
    )


def _findings(findings: Sequence[Finding], doing_nothing: Sequence[Finding]) -> str:
    before = {finding.measure.name: finding for finding in doing_nothing}
    lines = []
    for finding in in_order(findings):
        show, nothing = finding.measure.shown, before.get(finding.measure.name)
        blind = finding.measure.about_forgetting and nothing is not None and not nothing.deviates
        cells = [
            show(finding.value)
            if blind and not finding.deviates
            else _judged(show(finding.value), not finding.deviates),
            show(finding.retrained),
            interval_text(finding),
            p_text(finding.p_value),
            _cell(show(nothing.value), "told apart" if nothing.deviates else "passes") if nothing else MISSING,
        ]
        lines.append(HtmlLine(finding.measure.label, cells))
    headers = ["measure", "value", "retrained", "expected of a retrained model", "p", "doing nothing"]
    return html_table(headers, lines, card=True) + _note(_UNMARKED)


def _attacks(attacks: dict[str, Comparison]) -> str:
    lines = []
    for attack, found in attacks.items():
        lines.append(HtmlLine(f"{attack}: AUC", _auc_cells(found)))
        lines.append(HtmlLine(f"{attack}: TPR at 1% FPR", _tpr_cells(found)))
    table = html_table(["attack", "trained", "this model", "retrained", "gap"], lines, card=True)
    return "<h2>Membership attacks</h2>" + table + _note(_UNMARKED)


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


def _evidence(own: ModelAudit) -> str:
    kinds = {"for": "near", "against": "far", "neither": ""}
    items = "".join(
        f'<li><span class="{kinds[found.leaning]}">{escape(found.what)} {_LEANINGS[found.leaning]}</span>:'
        f" {escape(found.sentence)}</li>"
        for found in own.evidence
    )
    return f'<div class="card"><ul>{items}</ul></div>' if items else _note("None was gathered.")


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _judged(text: str, near: bool) -> str:
    return f'<span class="{"near" if near else "far"}">{escape(text)}</span>'


def _cell(text: str, below: str = "") -> str:
    return escape(text) + (f"<small>{escape(below)}</small>" if below else "")
