"""The words and numbers of an audit, the same in the page, the pictures and the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from expunge.auditing.equivalence import Finding
from expunge.auditing.intervals import Interval
from expunge.auditing.measures import POINT
from expunge.auditing.membership import Attack
from expunge.bench.auditing import Audit
from expunge.report.measures import MISSING

NO_RETRAINS = "No retrained models: nothing was compared, and there are no attacks to show. See the evidence."
EQUIVALENT_MEANS = (
    "EQUIVALENT means: in every measure below the model lies where one more model, honestly retrained without the data,"
    " would be expected, and these measures would have told a model that kept half of what the trained one knew. It is"
    " not a proof of forgetting: a trace that none of these measures sees, such as one in single weights, is not"
    " excluded; and nothing is said of what others kept or saw during training."
)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """What looks at the forgotten data first, each group in its own order."""
    return sorted(findings, key=lambda finding: not finding.measure.about_forgetting)


def interval_text(finding: Finding) -> str:
    """Where a further retrained model is expected; a limit that no value can pass is left out."""
    show = finding.measure.shown
    low = finding.low if finding.low > 0 else None
    high = None if finding.high >= (1.0 if finding.measure.margin == POINT else float("inf")) else finding.high
    if low is not None and high is not None:
        return f"{show(low)} to {show(high)}"
    if low is not None:
        return f"at least {show(low)}"
    return f"at most {show(high)}" if high is not None else "anything"


def p_text(value: float) -> str:
    """A p-value; small ones by their bound.

    Example:
        >>> p_text(0.0000021), p_text(0.0276), p_text(1.0)
        ('< 0.001', '0.028', '1')
    """
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def range_text(interval: Interval, percent: bool = False, sign: bool = False) -> tuple[str, str]:
    """A value and its limits in brackets.

    Example:
        >>> range_text(Interval(0.62, 0.55, 0.68)), range_text(Interval(0.05, -0.01, 0.11), percent=True, sign=True)
        (('0.620', '[0.550, 0.680]'), ('+5.0%', '[-1.0%, +11.0%]'))
    """
    form = ("+" if sign else "") + (".1%" if percent else ".3f")
    value, low, high = (format(part, form) for part in interval)
    return value, f"[{low}, {high}]"


def power_sentences(audit: Audit) -> list[str]:
    """What could have been told; methods beside the same retrained models share a sentence."""
    powers = (own.judgement.power for own in audit.methods.values())
    return list(dict.fromkeys(power.sentence for power in powers if power is not None))


def mean_auc(attacks: Iterable[Attack]) -> float:
    """Of several models."""
    return fmean(attack.auc.value for attack in attacks)


def mean_tpr(attacks: Iterable[Attack]) -> str:
    """Of several models, as text; a dash where there are too few non-members."""
    rates = [attack.tpr_at_1_percent for attack in attacks]
    known = [rate.value for rate in rates if rate is not None]
    return f"{fmean(known):.1%}" if known else MISSING
