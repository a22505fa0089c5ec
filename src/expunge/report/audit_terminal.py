"""An audit for a terminal: verdicts, what could be told, attacks, evidence."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from expunge.auditing.comparison import Comparison
from expunge.bench.auditing import Audit
from expunge.report.audit_text import mean_auc, mean_tpr, power_sentences
from expunge.report.layout import method_name
from expunge.report.measures import MISSING
from expunge.report.verdicts import mark_of

_COLOURS = {"near": "bold green", "open": "bold", "far": "bold red"}
_LEANINGS = {"for": "green", "against": "red", "neither": "dim"}
_METHOD_WIDTH, _ATTACK_WIDTH = 28, 10


def terminal_audit(audit: Audit, width: int = 100) -> list[RenderableType]:
    """What there is to print, for a terminal of this width.

    Example:
        >>> import numpy as np
        >>> from expunge.bench.results import Results
        >>> parts = terminal_audit(Audit(Results("demo", {}, {}, [], {}), {}, None, {}, np.ones(1), "No certificate."))
        >>> parts[-1].plain
        'No certificate.'
    """
    parts: list[RenderableType] = [_verdicts(audit), Text()]
    parts += [Text(f"{sentence}\n") for sentence in power_sentences(audit)]
    if any(own.attacks for own in audit.methods.values()):
        parts += [_attacks(audit, width), Text()]
    if any(own.evidence for own in audit.methods.values()):
        parts += [_evidence(audit), Text()]
    return [*parts, Text(audit.certificate)]


def _verdicts(audit: Audit) -> Table:
    table = _table(f"{audit.results.experiment}: was it forgotten?")
    table.add_column("method", overflow="fold", max_width=_METHOD_WIDTH)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for method, own in audit.methods.items():
        verdict = own.judgement.verdict
        styled = Text(verdict.value, style=_COLOURS[mark_of(verdict)])
        table.add_row(Text(method_name(method)), styled, Text(own.judgement.reason))
    return table


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
