"""An audit for a terminal: a sentence, a number, a picture and the limits; then attacks and evidence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from expunge.auditing import words
from expunge.auditing.comparison import Comparison
from expunge.auditing.margins import Finding
from expunge.auditing.model_audit import ModelAudit
from expunge.bench.auditing import Audit
from expunge.report.audit_text import mean_auc, mean_tpr, subject_of
from expunge.report.layout import method_name
from expunge.report.measures import MISSING
from expunge.report.mixing import known_curves, mixing_sentence
from expunge.report.verdicts import mark_of

_COLOURS = {"near": "bold green", "open": "bold", "far": "bold red"}
_LEANINGS = {"for": "green", "against": "red", "neither": "dim"}
_MARKS = {"within": (" ✓", "green"), "open": (" ?", "yellow"), "outside": (" ✗", "red")}
_MARKS_MEAN = "✓: within; ?: not shown to be; ✗: outside; –: too noisy here, left out."
_METHOD_WIDTH, _ATTACK_WIDTH = 28, 10
_BROAD, _CELLS = 100, 22
"""A terminal of this width has room for the whole picture; in another it has so many letters."""


def terminal_audit(audit: Audit, width: int = 100) -> list[RenderableType]:
    """What there is to print, for a terminal of this width.

    Example:
        >>> import numpy as np
        >>> from expunge.bench.results import Results
        >>> parts = terminal_audit(Audit(Results("demo", {}, {}, [], {}), {}, None, {}, np.ones(1), "No certificate."))
        >>> parts[-1].plain
        'No certificate.'
    """
    subject = subject_of(audit.results)
    parts: list[RenderableType] = [Text(f"{audit.results.experiment}: was it forgotten?", style="italic"), Text()]
    for method, own in audit.methods.items():
        parts += _first(method, own, subject, _CELLS if width < _BROAD else words.CELLS)
    if any(own.findings for own in audit.methods.values()):
        parts += [Text(f"{words.LEGEND} {_MARKS_MEAN}", style="dim"), Text()]
    limits = f"{words.LIMITS} {mixing_sentence(known_curves())}".strip()
    parts += [_paragraph("What no audit from outside can see: ", limits), Text()]
    if any(own.attacks for own in audit.methods.values()):
        parts += [_attacks(audit, width), Text()]
    if any(own.evidence for own in audit.methods.values()):
        parts += [_evidence(audit), Text()]
    return [*parts, *_provenance(audit), Text(audit.certificate)]


def _first(method: str, own: ModelAudit, subject: str, cells: int) -> list[RenderableType]:
    """What a reader has to know of a method."""
    found = own.judgement
    number = words.number(found)
    parts: list[RenderableType] = [
        Text.assemble((f"{method_name(method)}: ", "bold"), (found.verdict.value, _COLOURS[mark_of(found.verdict)])),
        Text(words.sentence(found.verdict, subject)),
        Text(number, style="bold"),
    ]
    if own.findings:
        parts += [Text(), _measures(own.findings, cells), Text()]
    if number != found.reason:
        parts.append(_paragraph("Why: ", found.reason))
    parts += [Text(line) for line in words.looks(own.as_it_is, own.later)] if own.as_it_is is not None else []
    if found.power is not None and mark_of(found.verdict) != "far":
        parts.append(_paragraph("What could be told: ", found.power.sentence))
    return [*parts, Text(words.attempt(found, own.provenance.counted)), Text()]


def _measures(findings: Sequence[Finding], cells: int) -> Table:
    table = _table("")
    table.title = None
    table.add_column("measure", overflow="fold")
    table.add_column("what is left", no_wrap=True)
    for header in ("model", "retrained", "before"):
        table.add_column(header, justify="right", no_wrap=True)
    for one in words.in_order(findings):
        mark, style = _MARKS[one.outcome] if words.counts(one) else (" –", "dim")
        show = one.measure.shown
        values = [Text(f"{show(one.value)}{mark}", style=style), Text(show(one.retrained)), Text(show(one.trained))]
        table.add_row(
            Text(one.measure.label), words.strip(one, cells), *values, style="" if words.counts(one) else "dim"
        )
    return table


def _provenance(audit: Audit) -> list[RenderableType]:
    """When, by which version, with which nonce: all digests are in the page and in the numbers."""
    return [
        Text(
            f"{method_name(method)}: model {own.provenance.after[:12]}, audited {own.provenance.date} by expunge"
            f" {own.provenance.version}, nonce {own.provenance.nonce}",
            style="dim",
        )
        for method, own in audit.methods.items()
    ]


def _paragraph(heading: str, text: str) -> Text:
    return Text.assemble((heading, "bold"), text)


def _attacks(audit: Audit, width: int) -> Table:
    """A line a model: the AUC of each attack that fits, the strongest last, and this one's TPR."""
    compared = {method: own.attacks for method, own in audit.methods.items() if own.attacks}
    first = next(iter(compared.values()))
    strongest = audit.attack or ""
    shown = sorted(first, key=lambda attack: attack == strongest)[
        -max(1, (width - _METHOD_WIDTH - 12) // _ATTACK_WIDTH) :
    ]
    table = _table("Membership attacks: AUC")
    table.caption = Text(
        "To be met is the retrained models' value, not 0.5. ✓: no gap to it is seen; ✗: there is one; no mark: there"
        " was none before either, so it shows nothing. Intervals are in the report."
    )
    table.add_column("model", overflow="fold", max_width=_METHOD_WIDTH)
    for attack in shown:
        table.add_column(attack, justify="right", max_width=_ATTACK_WIDTH)
    table.add_column(f"{strongest} TPR at 1% FPR", justify="right", max_width=11)
    before = [f"{first[attack].trained.auc.value:.3f}  " for attack in shown]
    table.add_row(Text(method_name("trained")), *before, mean_tpr([first[strongest].trained]))
    for method, attacks in compared.items():
        cells = [_cell(attacks[attack]) if attack in attacks else Text(MISSING) for attack in shown]
        rate = mean_tpr([attacks[strongest].unlearned]) if strongest in attacks else MISSING
        table.add_row(Text(method_name(method)), *cells, rate)
    means = [f"{mean_auc(first[attack].retrained):.3f}  " for attack in shown]
    count = len(first[strongest].retrained)
    table.add_row(Text(f"retrained, mean of {count}"), *means, mean_tpr(first[strongest].retrained), style="dim")
    return table


def _cell(found: Comparison) -> Text:
    value = f"{found.unlearned.auc.value:.3f}"
    if not found.gap.auc.covers(0):
        return Text(f"{value} ✗", style="red")
    return Text(f"{value}  ") if found.do_nothing.auc.covers(0) else Text(f"{value} ✓", style="green")


def _evidence(audit: Audit) -> Table:
    table = _table("Evidence without retrained models, for or against forgetting: no proof")
    table.add_column("method", overflow="fold", max_width=16)
    table.add_column("speaks")
    table.add_column("because", overflow="fold")
    for method, own in audit.methods.items():
        for number, found in enumerate(own.evidence):
            name = "" if number else method_name(method)
            table.add_row(Text(name), Text(found.leaning, style=_LEANINGS[found.leaning]), Text(found.sentence))
        table.add_section()
    return table


def _table(title: str) -> Table:
    table = Table(title=Text(title), caption_justify="left", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.padding = (0, 1, 0, 0)
    return table
