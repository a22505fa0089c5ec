"""What comes back when those who stay go on: the backdoor's success after more rounds, beside retrained models'."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from expunge.bench.results import Results
from expunge.report.layout import method_name, parts
from expunge.report.markdown import drawn_table, escaped
from expunge.report.measures import MISSING
from expunge.report.palette import BAND, FAINT, FONT, NOISE, colours, line_style, marker

METHOD = "retrace"
BAR = 0.02
"""How far above the retrained models of its seed a forgotten one may lie."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Later:
    """The backdoor's success in one training after some more rounds, a value a seed.

    Attributes:
        training: its name.
        rounds: how many more there were.
        trained: of the models that nothing was done to.
        retrained: of all retrained models.
        forgotten: of the forgotten models.
        excess: of each forgotten model above the mean of the retrained ones of its seed.
        loss_off: the same of the loss on forgotten data: below 0 something is left of it, also where no trigger works.
    """

    training: str
    rounds: int
    trained: list[float]
    retrained: list[float]
    forgotten: list[float]
    excess: list[float]
    loss_off: list[float]

    @property
    def within(self) -> int:
        """Of how many seeds the forgotten model is within the bar."""
        return sum(own <= BAR + _ROUNDING for own in self.excess)


def later(results: Results) -> list[Later]:
    """All trainings and rounds in which a backdoor was forgotten.

    Example:
        >>> from expunge.bench.results import Row, Variant
        >>> rows = [Row("retrain", 20, asr=0.01), Row("trained", 20, asr=0.9), Row("retrace", 20, asr=0.04)]
        >>> rows = [Row(row.method, row.seed, asr=row.asr, variant="SGD, 5 more rounds") for row in rows]
        >>> variants = {"SGD, 5 more rounds": Variant({"more_rounds": 5}, {}, {})}
        >>> (found,) = later(Results("persistence", {}, {}, rows, {}, variants))
        >>> found.training, found.rounds, round(found.excess[0], 2), found.within
        ('SGD', 5, 0.03, 0)
    """
    found = []
    for label, part in parts(results).items():
        if excess := _off(part, "asr"):
            trained, retrained, own = (part.values(name, "asr") for name in ("trained", "retrain", METHOD))
            training, rounds = label.rpartition(", ")[0], int(part.scenario.get("more_rounds", 0))
            found.append(Later(training, rounds, trained, retrained, own, excess, _off(part, "forget_loss")))
    return found


def _off(part: Results, measure: str) -> list[float]:
    """Of each forgotten model how far it is above the mean of the retrained ones of its seed."""
    own: dict[int, float] = {}
    others: dict[int, list[float]] = {}
    for row in part.rows:
        value = getattr(row, measure)
        if value is not None and row.method == METHOD:
            own[row.seed] = value
        if value is not None and row.method == "retrain":
            others.setdefault(row.seed, []).append(value)
    return [value - fmean(others[seed]) for seed, value in own.items() if seed in others]


def persistence_markdown(results: Results) -> str:
    """A line for each training and number of rounds: success of the backdoor, and how many seeds are within the bar."""
    headers = ["training", "more rounds", "trained", "retrained", "forgotten", "most above retrained", "within the bar"]
    headers.append("loss on forgotten data (off)")
    lines = [
        [
            escaped(each.training),
            str(each.rounds),
            _percent(each.trained),
            _percent(each.retrained),
            _percent(each.forgotten),
            _signed(100 * max(each.excess), 1),
            f"{each.within} of {len(each.excess)}",
            _signed(fmean(each.loss_off), 2) if each.loss_off else MISSING,
        ]
        for each in later(results)
    ]
    reading = (
        "Backdoor success in percent, lowest to highest over seeds (and retrained models), the mean in brackets. The"
        f" bar is {100 * BAR:g} points above the mean of the retrained models of the same seed, which went on alike;"
        " the loss is the mean difference to theirs, in nats."
    )
    return "\n\n".join([drawn_table(headers, lines), reading]) + "\n"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _percent(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    mean = f"{100 * fmean(values):.1f}"
    ends = [f"{100 * end:.1f}" for end in (min(values), max(values))]
    return mean if len(values) == 1 else f"{'–'.join(ends)} ({mean})"


def persistence_figures(results: Results) -> dict[str, Figure]:
    """The picture, where a backdoor was forgotten."""
    found = later(results)
    return {"persistence": persistence_plot(found)} if found else {}


def persistence_plot(found: Sequence[Later]) -> Figure:
    """Left the backdoor's success as rounds go by, then the loss on forgotten data, right other trainings.

    The first training is drawn by rounds, the others after the most rounds that they had.
    """
    first = [each for each in found if each.training == found[0].training]
    others = {each.training: each for each in found if each.training != found[0].training}
    with rc_context(FONT):
        columns = 3 if others else 2
        figure = Figure(figsize=(4.9 * columns, 5.0), layout="constrained")
        grid = figure.subplots(1, columns)
        _success(grid[0], first)
        _losses(grid[1], first)
        if others:
            _others(grid[2], list(others.values()))
        handles, names = grid[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=10)
    return figure


def _success(axes: Axes, found: Sequence[Later]) -> None:
    shades, x = colours(["trained", "retrain", METHOD]), [each.rounds for each in found]
    low, high = ([100 * of(each.retrained) for each in found] for of in (min, max))
    axes.fill_between(x, low, high, color=BAND, alpha=0.35, gid=NOISE, linewidth=0)
    for name, of in (("trained", "trained"), ("retrain", "retrained"), (METHOD, "forgotten")):
        values = [getattr(each, of) for each in found]
        if len({len(own) for own in values}) == 1 and name != "retrain":
            for run in zip(*values, strict=True):
                axes.plot(x, [100 * y for y in run], color=shades[name], alpha=0.2, linewidth=0.8)
        mean = [100 * fmean(own) for own in values]
        style = marker(name) + line_style(name)
        axes.plot(x, mean, style, color=shades[name], label=method_name(name), markersize=6)
    axes.set_ylim(-3, 103)
    _frame(axes, f"backdoor success ({found[0].training})", "more rounds of those who stay", x)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))


def _losses(axes: Axes, found: Sequence[Later]) -> None:
    x, colour = [each.rounds for each in found], colours([METHOD])[METHOD]
    room = 0.12 * (max(x) - min(x) or 1) / max(1, len(x) - 1)
    for each in found:
        count = len(each.loss_off)
        places = [each.rounds + room * (2 * (number + 0.5) / count - 1) for number in range(count)]
        axes.plot(places, sorted(each.loss_off), "o", color=colour, markersize=4, alpha=0.7)
    axes.axhline(0.0, color=FAINT, linewidth=0.8)
    _frame(axes, "loss on forgotten data minus retrained's, a mark a seed", "more rounds of those who stay", x)


def _others(axes: Axes, found: Sequence[Later]) -> None:
    places = list(range(len(found)))[::-1]
    colour = colours([METHOD])[METHOD]
    for place, each in zip(places, found, strict=True):
        axes.plot([100 * own for own in each.excess], [place] * len(each.excess), "o", color=colour, markersize=6)
    axes.axvline(100 * BAR, color="#D55E00", linestyle="--", linewidth=1.2)
    axes.axvline(0.0, color=FAINT, linewidth=0.8)
    axes.set_yticks(places, [each.training for each in found])
    _frame(axes, f"other trainings, after {found[0].rounds} more rounds", "backdoor success, points above retrained")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -1.0), max(high, 100 * BAR + 1.0))


def _frame(axes: Axes, title: str, x_name: str, ticks: Sequence[int] = ()) -> None:
    axes.set_title(title, fontsize=11.5, loc="left")
    axes.set_xlabel(x_name)
    if ticks:
        axes.set_xticks(list(ticks))
    axes.grid(color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
