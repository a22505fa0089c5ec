"""Where the paper contradicts itself, as data: shown under the tables, and once as a list.

Each sentence is about what its LaTeX has, and needs no measurement of ours; those that can be computed have a test.
"""

from expunge.report.printed import SOURCES

NOTES = {
    "main": (
        "Its text says that HF-KCU stays within 0.60 points of the retrained model (71.16 against 71.76); by Table 1"
        " 71.76 is the trained one, and the retrained one is 0.37 away.",
        "Its own definition of causal faithfulness gives 0.62 for HF-KCU and less than 0 for every other method;"
        " Table 1 has 0.38, and 0.27 and 0.10 for FedEraser and SISA, which its text calls negative.",
        "Its Figure 1a has other points than Table 1: retrained at 71.76, gradient ascent at 68.42, FedEraser at 70.15"
        " and 12.3×, SISA at 69.83 and 15.7×.",
        "Its Table 8 gives 1170 s and 24.5 s for the same model, Figure 1b 945 s and 19.5 s; the bars of Figure 1b"
        " differ by 48.5×, and 47.75× is written between them.",
        "Its conclusion has speedups from 49×; Table 1 has 47.75×, Table 2 40.55×, Table 5 41.53×, and Table 8 35×.",
    ),
    "datasets": (
        "Its Table 8 gives 35× for ResNet-18 (6300 s against 180 s), Table 2 has 82.04×.",
        "Its abstract has one speedup, 47.75×, for all data and models; Table 2 has 40.55× to 82.04×.",
        "Its set-up has the CNN of 188,810 parameters for MNIST and Fashion-MNIST; a network of this shape has so many"
        " with three channels of input, and 188,234 with one.",
    ),
    "backdoor": (
        "Its Table 1 has 47.75× for the same model and protocol, Table 3 has 430×; retraining took 1867.89 s here,"
        " 945 s or 1170 s elsewhere.",
        "Models retrained without one of ten clients reach 70.79 in Table 1, 70.59 in Table 6 and 72.58 in Table 3.",
    ),
    "components": (
        "Its text has a parameter gap of 0.032, and 0.089 without causal weighting; Table 4 has 1.409 and 1.406.",
        "Its text has an accuracy of 65.23 without adaptive scaling; Table 4 has 70.99.",
        "By Table 4 accuracy rises and the gap falls where causal weighting is left out; its text has the gap grow"
        " nearly threefold.",
        "Its Figure 1a has an accuracy of 70.85 without causal weighting, Table 4 has 71.51.",
        "Influence decay and uniform influence are in Table 4 and nowhere else: neither is defined.",
    ),
    "damping": (
        "lambda = 0.01 is the setting of Table 1, which has 71.16, a causal faithfulness of 0.38 and 47.75×.",
        "Algorithm 1 takes k iterations whatever lambda is, so the work is the same; Table 5 has 41.53× to 209.74×.",
        "The column of accuracies in percent has 0.7093, 0.7029 and 0.7089.",
    ),
    "heterogeneity": (
        "alpha = 0.5 is the setting of Table 1, which has 71.16, retrained 70.79, and 47.75×.",
        "Its text explains the growing speedup by better conditioning; with k iterations whatever the conditioning is,"
        " that cannot change the time.",
    ),
    "clients": ("The values for 10 clients are those of alpha = 1.0 in Table 6; the set-up says alpha = 0.5.",),
    "wallclock": ("The seconds of retraining the CNN are 945 in Figure 1b and 1867.89 in Table 3.",),
    "functional": ("Its text has an accuracy gap of 0.60 points, Table 9 has 0.37.",),
    "convergence": (
        "The point of client 1 at iteration 5 lies above the bound that is drawn with it.",
        "The curves are those of clients 1 and 2; in its set-up client 0 leaves, and nobody else solves anything.",
    ),
    "conditioning": ("The points without a preconditioner are its theory, 5 sqrt(kappa), rounded.",),
    "method": (
        "It defines deletion as minimising the loss without w_j L_j. At the optimum of the whole loss the rest has the"
        " gradient -w_j grad L_j, so a Newton step on the rest is +H^-1 w_j grad L_j; it prints -H^-1 w_j grad L_j,"
        " which is the effect of giving the data more weight.",
        "Its influence equations take the Hessian of everybody's loss, Algorithm 1 that of the leaver's alone.",
        "Algorithm 1 gives a single leaver the causal weight 1, cuts its step at beta = 0.01 of the length of theta,"
        " and then multiplies by its share of the data, about 0.1: the model moves by at most 0.1% of its length.",
        "Its proposition on isolation says that the updates of clients without deleted data are zero. All clients share"
        " one model, and Algorithm 1 adds the leaver's update to it.",
        "Memory is O(d) in Section 3, and O(kd) where it lists its limitations.",
        "Edge case 2 of causal faithfulness is a negative numerator; the numerator is an absolute value.",
    ),
    "theory": (
        "It says that for a condition number of 100 about 10 iterations suffice for an error of 0.01; its own bound,"
        " 2 (9/11)^k, needs 27, and is 0.27 after 10.",
        "The aggregation error of O(1/sqrt(N)) is asserted where it is used; there is no argument for it.",
        "It says that with more iterations HF-KCU approaches certified removal; by its own bound the aggregation error"
        " stays, whatever k is.",
        "The theorem has an error of finite differences, O(delta); delta is not defined, and the method differentiates"
        " automatically.",
        "Its theorem on certified removal bounds the total variation between two outputs. Without noise in the"
        " algorithm both are fixed models, and it is 0 where they are equal and 1 where they are not.",
        "That proof takes the gradients' Lipschitz constant for that of the predictions.",
    ),
}
"""By experiment, and for what no experiment is about."""

_OTHERS = {"method": "The method", "theory": "The theorems"}


def contradictions_markdown() -> str:
    """Everything as one list, a heading for each table or figure of the paper.

    Example:
        >>> contradictions_markdown().splitlines()[0]
        '**Table 1; seconds from Figure 1b**'
    """
    blocks = []
    for name, notes in NOTES.items():
        heading = _OTHERS[name] if name in _OTHERS else SOURCES[name]
        blocks += [f"**{heading}**", "\n".join(f"- {_escaped(note)}" for note in notes)]
    return "\n\n".join(blocks) + "\n"


def _escaped(note: str) -> str:
    """An underscore or a caret is meant, not markup."""
    return note.replace("_", "\\_").replace("^", "\\^")
