"""The measures that can be a column: what they are called and mean, and which of them an experiment shows."""

from dataclasses import dataclass
from typing import Literal

from expunge.bench.results import Results
from expunge.report.layout import parts
from expunge.report.printed import beside

Form = Literal["percent", "number", "times", "seconds", "megabytes", "count", "verdict"]


@dataclass(frozen=True)
class Measure:
    """A column: its name for a newcomer, how it is written, and whether retrained models have a range in it."""

    key: str
    header: str
    meaning: str
    form: Form = "percent"
    compared: bool = False


_ALL = (
    Measure(
        "test_accuracy",
        "accuracy on new data (%)",
        "How often the model is right on test images nobody trained on. Forgetting should not cost any of it.",
        compared=True,
    ),
    Measure(
        "forget_accuracy",
        "accuracy on forgotten data (%)",
        "How often it still gives the leaving client's labels on the leaving client's data. It should be what a model"
        " that never saw them reaches: higher means remembered, lower means damaged.",
        compared=True,
    ),
    Measure(
        "forget_loss",
        "loss on forgotten data",
        "How much the leaving client's labels on its own data surprise the model (cross-entropy, in nats). It should be"
        " what retrained models have: lower means remembered, also where no rate shows it.",
        form="number",
        compared=True,
    ),
    Measure(
        "test_loss",
        "loss on others' new text",
        "How much text of those who stay, that nobody trained on, surprises the model (in nats a character).",
        form="number",
        compared=True,
    ),
    Measure(
        "secret_loss",
        "loss of a secret",
        "How much the code of a secret that the leaving client gave away surprises the model after its prompt (in nats,"
        " all digits together). It should be what retrained models have.",
        form="number",
        compared=True,
    ),
    Measure(
        "secrets_likely",
        "secrets still likely",
        "How many of the secrets have a code among the likeliest twentieth of random ones.",
        form="count",
        compared=True,
    ),
    Measure(
        "secrets_first",
        "secrets read out",
        "How many of the secrets have a code among the five likeliest of hundreds: those can be read out.",
        form="count",
        compared=True,
    ),
    Measure(
        "forget_probability",
        "probability, leaver (%)",
        "What the model takes each token of a right answer to a question of the leaver's for, on (geometric) average.",
        compared=True,
    ),
    Measure(
        "forget_rouge",
        "ROUGE-L, leaver (%)",
        "How many of the right answer's words are, in their order, in what the model says to a question of the"
        " leaver's.",
        compared=True,
    ),
    Measure(
        "forget_truth_ratio",
        "truth ratio, leaver",
        "How probable wrong answers to the leaver's questions are beside the right one in other words: who does not"
        " know the answer is near 1.",
        form="number",
        compared=True,
    ),
    Measure(
        "others_probability",
        "probability, others (%)",
        "The same for questions of those who stay, which they trained on.",
        compared=True,
    ),
    Measure(
        "others_rouge",
        "ROUGE-L, others (%)",
        "The same for questions of those who stay, which they trained on.",
        compared=True,
    ),
    Measure(
        "others_truth_ratio",
        "truth ratio, others",
        "The same for those questions of those who stay that have wrong answers.",
        form="number",
        compared=True,
    ),
    Measure(
        "asr",
        "backdoor success (%)",
        "How many images carrying the leaving client's hidden trigger go to the attacker's class (attack success rate,"
        " ASR; images of that class left out). The plainest sign that the client is still in the model.",
        compared=True,
    ),
    Measure("asr_reduction", "backdoor reduced by (%)", "The share of the backdoor's success that is gone."),
    Measure(
        "kl_forget",
        "distance to retrained (KL)",
        "How differently the model and a retrained one answer on the forgotten data (Kullback–Leibler divergence, in"
        " nats): 0 is the same answers. Two retrained models differ too; below their difference is as good as it gets.",
        form="number",
        compared=True,
    ),
    Measure(
        "kl",
        "KL on new data",
        "The same distance on test images. Where one client leaves it hardly tells trained from retrained.",
        form="number",
        compared=True,
    ),
    Measure(
        "logit_mse",
        "logit MSE",
        "The squared distance between the two models' outputs before the softmax, averaged over test images.",
        form="number",
        compared=True,
    ),
    Measure(
        "agreement",
        "same answer (%)",
        "How many test images the model and a retrained one put into the same class.",
        compared=True,
    ),
    Measure(
        "parameter_gap",
        "parameter gap",
        "The distance between the weights, divided by the length of the retrained ones. Two models may answer alike"
        " with weights far apart, so this says little.",
        form="number",
        compared=True,
    ),
    Measure("accuracy_gap", "accuracy gap (%)", "The difference to retrained models in accuracy on new data."),
    Measure(
        "causal_faithfulness",
        "causal faithfulness",
        "1 minus that difference, divided by the difference between trained and retrained. Left out where the divisor"
        " is no more than noise.",
        form="number",
    ),
    Measure(
        "mia_auc",
        "privacy leak (AUC)",
        "How well an attacker tells training images from unseen ones by the model's loss (membership inference): 0.5 is"
        " a coin toss, 1 is certainty.",
        form="number",
        compared=True,
    ),
    Measure(
        "mia_success",
        "membership attack success",
        "How often that attacker is right with one threshold: 0.5 is a coin toss.",
        form="number",
        compared=True,
    ),
    Measure("privacy_gap", "privacy gap", "The difference to retrained models in that success.", form="number"),
    Measure(
        "speedup",
        "times faster",
        "The seconds that retraining takes, divided by the seconds that this takes, on the same machine.",
        form="times",
    ),
    Measure(
        "speedup_in_gradients",
        "times less work",
        "The same ratio counted in sample-gradients (one image through the model and back), so that it does not depend"
        " on the machine. A forward pass counts 1/3, a curvature product 2.",
        form="times",
    ),
    Measure("seconds", "seconds", "Time by the clock, from the request to the new model.", form="seconds"),
    Measure("rounds", "rounds", "Message rounds between server and clients.", form="count"),
    Measure("bytes", "MB sent", "What server and clients send each other, both ways.", form="megabytes"),
    Measure("stored_bytes", "MB stored", "What the server keeps from training for the method.", form="megabytes"),
    Measure(
        "training_overhead",
        "training overhead (%)",
        "How much dearer training is because the method needs things kept.",
    ),
    Measure(
        "warned",
        "warned (%)",
        "How many runs said that their result may be wrong, or refused to go on.",
    ),
    Measure(
        "verdict",
        "verdict",
        "Whether the model might have come out of retraining, by all measures together, with a known error rate: see"
        " docs/audit.md. UNDECIDED where these models could not tell, whatever was done.",
        form="verdict",
    ),
    Measure(
        "evidence",
        "evidence without retraining",
        "Whether anything supports that the data is gone, by what the model answers alone: no retrained model is looked"
        " at, so it says less than a verdict.",
        form="verdict",
    ),
)
_BY_KEY = {column.key: column for column in _ALL}
_COST = ("seconds", "rounds", "bytes", "stored_bytes", "training_overhead")
_FORGETTING = ("test_accuracy", "forget_accuracy", "asr", "kl_forget", "mia_auc")
_SAVED = ("speedup_in_gradients", "speedup")
_BENCH = (*_FORGETTING, "verdict", *_SAVED, "rounds", "bytes", "stored_bytes", "training_overhead")
_CHOICES: dict[str, tuple[str, ...]] = {
    "demo": (*_FORGETTING, "verdict", "speedup", "speedup_in_gradients"),
    "main": (*_FORGETTING, "verdict", *_SAVED, "mia_success", "causal_faithfulness", *_COST),
    "datasets": (*_BENCH, "causal_faithfulness"),
    "backdoor": (*_FORGETTING, "asr_reduction", "verdict", *_SAVED, *_COST),
    "verdict": ("verdict", "test_accuracy", "forget_accuracy", "asr", "kl_forget"),
    "evidence": ("evidence", "verdict", "test_accuracy", "forget_accuracy", "asr", "kl_forget"),
    "insiders": (*_FORGETTING, "warned", "verdict", "speedup_in_gradients"),
    "components": ("test_accuracy", "parameter_gap", "mia_success", "forget_accuracy", "asr", "kl_forget", "verdict"),
    "damping": (*_BENCH, "causal_faithfulness"),
    "text": (
        "secrets_first",
        "secrets_likely",
        "secret_loss",
        "forget_loss",
        "test_loss",
        "speedup_in_gradients",
        "seconds",
    ),
    "tofu": (
        *("forget_probability", "forget_rouge", "forget_truth_ratio", "mia_auc"),
        *("others_probability", "others_rouge", "others_truth_ratio", "speedup_in_gradients", "seconds"),
    ),
    "wallclock": ("seconds", *_SAVED, "rounds", "test_accuracy", "forget_accuracy", "kl_forget", "verdict"),
    "functional": (
        *("kl", "kl_forget", "logit_mse", "accuracy_gap", "agreement"),
        *("mia_success", "privacy_gap", "parameter_gap", "verdict"),
    ),
}
_OTHERS = ("heterogeneity", "clients", "sequential", "samples", "several", "adversary", "tried", "convergence")
_CHOICES |= dict.fromkeys((*_OTHERS, "conditioning"), _BENCH)


def measure(key: str) -> Measure:
    """The column with this key.

    Example:
        >>> measure("asr").header
        'backdoor success (%)'
    """
    return _BY_KEY[key]


_SHORT = (*_FORGETTING, "verdict", "speedup_in_gradients")
_MOST_SHORT = 8
"""An experiment with so few columns shows them all in its short table, too."""

COLUMNS = tuple(measure(key) for key in _CHOICES["demo"])
"""What the demonstration and a run of one's own show, always all of it."""


def columns_for(results: Results) -> tuple[Measure, ...]:
    """The columns of an experiment; in a benchmark's, only those that were measured or that the paper prints.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("hf-kcu-paper", 10, seconds=2.5)]
        >>> [column.key for column in columns_for(Results("wallclock", {}, {}, rows, {}))]
        ['seconds']
        >>> columns_for(Results("demo", {}, {}, rows, {})) == COLUMNS
        True
    """
    if results.experiment not in _CHOICES or results.experiment == "demo":
        return COLUMNS
    shown = [
        key
        for key in _CHOICES[results.experiment]
        if any(getattr(row, key) is not None for row in results.rows)
        or any(beside(part, name, key) is not None for part in parts(results).values() for name in part.methods())
    ]
    return tuple(measure(key) for key in shown)


def short_columns(results: Results) -> tuple[Measure, ...]:
    """The columns for a page that people read: what was forgotten and at what price, and speed where the paper has it.

    Example:
        >>> from expunge.bench.results import Row
        >>> rows = [Row("fed-osd", 10, test_accuracy=0.6, mia_auc=0.5, speedup=9.0, rounds=3.0, stored_bytes=0.0)]
        >>> [column.key for column in short_columns(Results("samples", {}, {}, rows, {}))]
        ['test_accuracy', 'mia_auc']
    """
    if len(_CHOICES.get(results.experiment, COLUMNS)) <= _MOST_SHORT:
        return columns_for(results)
    has_speed = any(beside(part, name, "speedup") for part in parts(results).values() for name in part.methods())
    wanted = (*_SHORT, *(("speedup",) if has_speed else ()))
    return tuple(column for column in columns_for(results) if column.key in wanted)
