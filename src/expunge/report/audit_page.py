"""The page of an audit: verdicts first, then why; one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from expunge.auditing import words
from expunge.auditing.model_audit import ModelAudit
from expunge.auditing.verdict import Verdict
from expunge.bench.auditing import Audit
from expunge.report.audit_plots import audit_figures
from expunge.report.audit_tables import attacks_table, evidence_list, findings_table, note
from expunge.report.audit_text import NO_RETRAINS, subject_of
from expunge.report.layout import file_label, method_name, scenario_line
from expunge.report.measures import MISSING
from expunge.report.mixing import known_curves, mixing_plot, mixing_sentence
from expunge.report.pictures import figure
from expunge.report.pieces import definitions, document, write_page
from expunge.report.verdicts import MEANINGS, mark_of

_TITLE = "Audit: did the model forget?"
_READING = {
    "retrained": "Models trained again from the start without the data. What they show is the goal: no other value is.",
    "doing nothing": "The trained model as it is: what it shows beyond retrained models is what there was to forget.",
    "what passes": "The margin: a tenth of what there was to forget, or three standard deviations of the retrained"
    " models, if that is more. A measure counts only where that is at most three tenths.",
    "still there": "Where the model lies between retrained models (0%) and doing nothing (100%); below 0% it went"
    " further than retraining does.",
    "open": "Not shown to be within the margin, nor outside it: more retrained models might tell.",
    "AUC": "The chance that a membership attack ranks a forgotten sample above one that nobody trained on; 0.5 is"
    " guessing. On a retrained model it may be another value, since a client's samples are not like others'.",
    "TPR at 1% FPR": "The share of the forgotten samples found when 1% of the others are taken for them by mistake;"
    f" {MISSING} where there are too few samples to say.",
    "gap": "The model's value minus the retrained models' mean, with its 95% interval. Near 0 is good, below 0 is a"
    " trace, too.",
}


def write_audit(audit: Audit, path: str | Path, drawn: Mapping[str, Figure] | None = None) -> Path:
    """Write the page of an audit, with its pictures where they are drawn already; its folder is made if need be.

    Raises:
        RequestError: the path cannot be written.
    """
    return write_page(render_audit(audit, drawn), path)


def render_audit(audit: Audit, drawn: Mapping[str, Figure] | None = None) -> str:
    """The page as text.

    Example:
        >>> import numpy as np
        >>> from expunge.bench.results import Results
        >>> "No method" in render_audit(Audit(Results("demo", {}, {}, [], {}), {}, None, {}, np.ones(1), ""))
        True
    """
    drawn, curves = audit_figures(audit) if drawn is None else drawn, known_curves()
    subtitle = ". ".join(filter(None, (audit.results.experiment, scenario_line(audit.results))))
    of = f"The attack is {audit.attack}." if audit.attack else ""
    common = [figure(name, drawn[name], of) for name in ("audit-scores", "audit-roc") if name in drawn]
    sections = [
        f"<header><h1>{escape(_TITLE)}</h1><p>{escape(subtitle)}</p></header>",
        *(_first(method, own, subject_of(audit.results), drawn) for method, own in audit.methods.items()),
        "" if audit.methods else "<p>No method was tried.</p>",
        "<h2>What no audit from outside can see</h2>",
        f"<p>{escape(f'{words.LIMITS} {mixing_sentence(curves)}'.strip())}</p>",
        figure("audit-mixing", mixing_plot(curves)) if curves else "",
        '<h2 class="variant">Details</h2>',
        *(_method(method, own) for method, own in audit.methods.items()),
        "<h2>Can the forgotten samples be recognised?</h2>",
        *(common or [note(NO_RETRAINS)]),
        "<h2>Certificate</h2>",
        f"<p>{escape(audit.certificate)}</p>",
        "<h2>Which models</h2>",
        f'<div class="card">{definitions(_provenance(audit.methods), small=True)}</div>',
        "<h2>How to read this</h2>",
        definitions({verdict.value: MEANINGS[verdict.value] for verdict in Verdict} | _READING),
    ]
    return document(_TITLE, sections)


def _first(method: str, own: ModelAudit, subject: str, drawn: Mapping[str, Figure]) -> str:
    """What a reader has to know of a method: a sentence, a number, the picture, how often the request was audited."""
    found, name = own.judgement, f"audit-verdict-{file_label(method)}"
    number = words.number(found)
    why = [] if number == found.reason else [note(f"Why: {found.reason}")]
    return "\n".join(
        [
            f'<section class="card result first {mark_of(found.verdict)}"><p><a href="#{file_label(method)}">'
            f"{escape(method_name(method))}</a></p><h2>{escape(found.verdict.value)}</h2>",
            f"<p>{escape(words.sentence(found.verdict, subject))}</p>",
            f'<p class="number">{escape(number)}</p>',
            *why,
            *(note(line) for line in (words.looks(own.as_it_is, own.later) if own.as_it_is is not None else [])),
            note(words.attempt(found, own.provenance.counted)),
            "</section>",
            figure("audit-verdict", drawn[name]) if name in drawn else "",
        ]
    )


def _provenance(methods: Mapping[str, ModelAudit]) -> dict[str, str]:
    """When, by which version, with which nonce, and the SHA-256 of every model."""
    if not methods:
        return {}
    first = next(iter(methods.values())).provenance
    refused = {one.number for own in methods.values() for one in own.judgement.refused}
    retrained = {
        f"retrained[{number}]": digest + (" (left out)" if number in refused else "")
        for number, digest in enumerate(first.retrained)
    }
    return {
        "looked at": max(own.provenance.date for own in methods.values()),
        "expunge": first.version,
        method_name("trained"): first.before,
        **{f"{method_name(method)}": own.provenance.after for method, own in methods.items()},
        **{f"nonce for {method_name(method)}": own.provenance.nonce for method, own in methods.items()},
        **retrained,
        **{f"same start[{number}]": digest for number, digest in enumerate(first.same_start)},
    }


def _method(method: str, own: ModelAudit) -> str:
    return "\n".join(
        [
            f'<section id="{file_label(method)}"><h2 class="variant">{escape(method_name(method))}</h2>',
            f"<p>{escape(own.power.sentence)}</p>" if own.power is not None else "",
            findings_table(own.findings) if own.findings else "",
            attacks_table(own.attacks) if own.attacks else "",
            "<h2>Evidence without retrained models</h2>",
            evidence_list(own.evidence),
            "</section>",
        ]
    )
