"""Pictures inside a page: each for light and for dark screens, with what it shows in words."""

import base64
import io
from html import escape

from matplotlib.figure import Figure

from expunge.report.dark import in_dark
from expunge.report.plots import save_figure

_FIGURES = {
    "forgetting": (
        "Success of the backdoor, accuracy on the forgotten and on new data, for each method",
        "Forgotten means: the mark lies on the blue band, where models trained without the forgotten data lie."
        " The last panel does not start at zero.",
    ),
    "cost": (
        "Distance to the retrained model against cost, for each method",
        "Best is far right and down in the band: cheap, and as close to retraining as retraining is to itself."
        " Thin vertical lines show the range over runs.",
    ),
    "pareto": (
        "Accuracy on new data against speed, for each method, with the paper's points",
        "Doing nothing is the dashed line: accuracy on new data alone does not show that anything was forgotten.",
    ),
    "seconds": ("Seconds that each method takes", "Machines differ: compare ratios, not seconds."),
    "variants": (
        "Accuracy, backdoor success and cost by variant, a line for each method",
        "The blue band is the range of models retrained without the forgotten data; bars show the spread over runs.",
    ),
    "series": ("Curves, a line for each method", "Shades reach from the lowest to the highest run."),
    "response": (
        "How much of a client's pull is left at the end of training, by curvature, a panel for each training",
        "Marks are measured, trained minus retrained from the same start, and as large as the share of the pull that"
        " they hold; bars reach from the lowest to the highest seed. Lines are what the step takes for left.",
    ),
    "scaling": (
        "Seconds and peak memory of a request and of retraining, by the number of parameters, both axes logarithmic",
        "A mark is a model. Of large ones one round of retraining was timed, and all take as many times as long.",
    ),
    "persistence": (
        "Success of the backdoor after more rounds of those who stay, beside retrained models that went on alike",
        "Forgotten means: nothing comes up on the left, and the marks in the middle lie at 0. Thin lines are single"
        " seeds.",
    ),
    "text": (
        "Secrets, the leaver's text and the others' text, for each method",
        "Forgotten means: the mark lies on the blue band, where models trained without the speaker lie.",
    ),
    "tofu": (
        "What the model knows of the leaver's authors and of the others', for each method",
        "Forgotten means: the mark lies on the blue band, where models trained without the leaver lie.",
    ),
    "power": (
        "The share of honest retrains that are called EQUIVALENT, by the number of retrained models",
        "Bars are exact 95% intervals (Clopper-Pearson).",
    ),
    "mixing": (
        "The share of mixtures that are called EQUIVALENT, by the percent of trained weights in them",
        "Good is a line that has come down to nothing where much is mixed in. Bars are exact 95% intervals"
        " (Clopper-Pearson).",
    ),
    "audit-scores": (
        "Scores of a membership attack, a row for each model",
        "Forgotten means: the two shapes of a row are apart no more than they are in the retrained model's row. Each"
        " row has its own height.",
    ),
    "audit-roc": (
        "Share of the forgotten samples found against false alarms, both on logarithmic axes, a line for each model",
        "Forgotten means: the method's line lies where the retrained model's does. Far left, a few samples decide.",
    ),
    "audit-mixing": (
        "How often models with a share of the trained weights mixed in are called EQUIVALENT",
        "From the study of the verdict, not from this model: honest retrained models are at 0 percent.",
    ),
    "audit-verdict": (
        "How much of what the trained model showed is left, a line for each measure, with what passes",
        "Forgotten means: the mark lies on the blue bar with the whole of its line. The line is what is not known of"
        " the retrained models' mean; arrows lie further out; faint measures are too noisy here, and left out.",
    ),
}


def figure(name: str, drawn: Figure, of: str = "") -> str:
    """A picture inside the page, for light and for dark screens, with what it shows in words, and of what."""
    description, note = _FIGURES[name]
    drawing = io.StringIO()
    save_figure(drawn, drawing, transparent=True, format="svg", metadata={"Date": None})
    light, night = (_data(svg) for svg in (drawing.getvalue(), in_dark(drawing.getvalue())))
    kind = "full" if drawn.get_figwidth() > 12 else "" if drawn.get_figwidth() > 10 else "narrow"
    return (
        f'<figure class="{kind}"><div class="picture" role="region" aria-label="picture" tabindex="0"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{night}">'
        f'<img alt="{escape(description)}" src="{light}"></picture></div>'
        f"<figcaption>{escape(f'{note} {of}'.strip())}</figcaption></figure>"
    )


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode('ascii')}"
