"""One experiment for every table and figure of the paper, and those beyond it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from expunge.auditing.verdict import RETRAINS
from expunge.bench.adversary import LIES
from expunge.bench.cells import Kept, RetrainedCell
from expunge.bench.colluders import SEEDS as COLLUDERS_SEEDS
from expunge.bench.colluders import colluders
from expunge.bench.evidence import RETRAINS as TEN
from expunge.bench.evidence import SEEDS as EVIDENCE_SEEDS
from expunge.bench.evidence import run_evidence
from expunge.bench.hospitals import EXPERIMENT as HOSPITALS
from expunge.bench.insiders import SEEDS as INSIDERS_SEEDS
from expunge.bench.insiders import insiders
from expunge.bench.persistence import SEEDS as PERSISTENCE_SEEDS
from expunge.bench.persistence import persistence
from expunge.bench.response import SEEDS as RESPONSE_SEEDS
from expunge.bench.response import response, responses
from expunge.bench.results import Results, Series
from expunge.bench.runner import Experiment
from expunge.bench.scales import Scale
from expunge.bench.scenario import Scenario
from expunge.bench.settings import Contender, Forget, Setting, together
from expunge.bench.store import Store
from expunge.bench.studies import conditioning, perturbation
from expunge.bench.text import SEEDS as TEXT_SEEDS
from expunge.bench.text import run_text, text_scale
from expunge.bench.tofu import SEEDS as TOFU_SEEDS
from expunge.bench.tofu import run_tofu, tofu_scale
from expunge.bench.trainings import SEEDS as UNSEEN
from expunge.bench.trainings import replay, trainings
from expunge.bench.verdict import SEEDS, fashion_scenario, run_verdicts
from expunge.core.bounds import cg_rate
from expunge.data import Backdoor
from expunge.data.backdoor import Corner
from expunge.errors import RequestError
from expunge.federation.training.fedavg import Progress

DEFAULT = Contender("retrace")
OURS = (
    Contender("hf-kcu-paper"),
    Contender("hf-kcu"),
    Contender("retrace-krylov"),
    DEFAULT,
    Contender("retrace+recovery"),
)
BASELINES = tuple(
    Contender(name)
    for name in ("gradient-ascent", "fed-eraser", "sisa", "projected-gradient-ascent", "fine-tuning", "not", "fed-osd")
)
CONTROLS = (Contender("fine-tuning-same-budget", budget_of=DEFAULT), Contender("unfiltered+recovery"))
EVERYONE = (*BASELINES, *CONTROLS, *OURS)
FIVE = {"paper": (10, 11, 12, 13, 14)}
"""Seeds of the two tables that carry the most weight, at the paper's scale."""
TUNING = {"smoke": (0,), "small": (0, 1, 2), "paper": (0, 1, 2)}
"""The seeds that settings were chosen on: nothing but what was tried is shown for them."""
FRESH = {"smoke": (15,), "small": (15, 16, 17), "paper": (15, 16, 17)}
"""Seeds that the default had never been run on when it was settled."""
ABLATION: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "hf-kcu": {
        "full": {},
        "without causal weighting": {"curvature_of": "everyone"},
        "without adaptive scaling": {"tau": None},
        "without influence decay": {"influence_decay": False},
        "uniform influence": {"causal_weights": "uniform"},
    },
    "hf-kcu-paper": {
        "full": {},
        "without causal weighting": {"causal_weights": "none"},
        "without adaptive scaling": {"beta": None},
        "without influence decay": {"influence_decay": False},
        "uniform influence": {"causal_weights": "uniform"},
    },
}
"""The component ablation (the paper's Table 4) of the corrected step and of the printed one."""
LARGE = ("resnet18-bf16", "vit-lite-bf16")
LARGE_SEEDS, LARGE_RETRAINS = 1, 2
"""What the large models get: training them takes longer than all else. Two models show no spread, hence no verdict."""


def _setting(
    scale: Scale,
    label: str,
    scenario: Scenario,
    contenders: tuple[Contender, ...],
    *forgets: Forget,
    tamper: str = "",
) -> Setting:
    who = forgets or (Forget((scale.leaver,)),)
    if scenario.model in LARGE:
        return Setting(label, scenario, who, contenders, LARGE_RETRAINS, 0, tamper, LARGE_SEEDS)
    retrains = scale.retrains if _retrained_anyway(scale, scenario, together(who)) else scale.other_retrains
    return Setting(label, scenario, who, contenders, retrains, scale.same_init, tamper)


def _retrained_anyway(scale: Scale, scenario: Scenario, gone: Forget) -> bool:
    """Whether `main` or `backdoor` have the same retrained models: an attacker that leaves takes its attack along."""
    wanted, leaver = RetrainedCell(scenario, gone, 0), Forget((scale.leaver,))
    return any(wanted == RetrainedCell(scale.on(dataset).base, leaver, 0) for dataset in _attacked(scale))


def _attacked(scale: Scale) -> tuple[str, ...]:
    """The datasets on which a client is poisoned."""
    return ("cifar10", "fashion-mnist", "mnist") if scale.name == "paper" else (scale.base.dataset,)


def main(scale: Scale) -> list[Setting]:
    """Table 1 and its two figures: a clean client leaves, every method."""
    return [_setting(scale, scale.base.dataset, scale.base, EVERYONE)]


def datasets(scale: Scale) -> list[Setting]:
    """Table 2: other data and other models."""
    pairs = {
        "smoke": [("digits", "digits-net"), ("digits", "softmax")],
        "small": [("mnist", "cnn-narrow"), ("fashion-mnist", "cnn-narrow"), ("digits", "digits-net")],
        "paper": [
            ("mnist", "cnn"),
            ("cifar10", "vit-lite-bf16"),
            ("cifar10", "resnet18-bf16"),
            ("fashion-mnist", "cnn"),
        ],
    }[scale.name]
    if scale.name == "small" and scale.base.dataset == "digits":
        pairs = [("digits", "digits-net"), ("digits", "softmax")]
    found = []
    for dataset, model in pairs:
        base = scale.on(dataset, model).base
        if dataset == "digits" and not scale.is_smoke:
            base = dataclasses.replace(base, train_samples=None, test_samples=None, shrink=1)
        label = dataset if model in ("cnn", "cnn-narrow", "digits-net") else f"{dataset} {model}"
        found.append(_setting(scale, label, base, OURS))
    return found


def backdoor(scale: Scale) -> list[Setting]:
    """Table 3: a poisoned client leaves; as printed, and with an attack that is worth removing.

    At the paper's scale on two more datasets, without the baselines that cost about as much as training.
    """
    found = []
    for dataset in _attacked(scale):
        own, prefix = scale.on(dataset), f"{dataset}, " if scale.name == "paper" else ""
        contenders = EVERYONE if dataset == scale.base.dataset else (Contender("fine-tuning"), *CONTROLS, *OURS)
        for label, strong in (("printed protocol", False), ("strong", True)):
            found.append(_setting(own, prefix + label, own.attacked(own.leaver, strong=strong), contenders))
    return found


def components(scale: Scale) -> list[Setting]:
    """The component ablation: a client leaves, and data spread unequally over three clients; corrected, as printed."""
    rows = tuple(
        Contender(name, changes, prefix + label)
        for name, prefix in (("hf-kcu", ""), ("hf-kcu-paper", "as printed: "))
        for label, changes in ABLATION[name].items()
    )
    spread = Forget(shares={"client-1": 0.6, "client-2": 0.3, "client-3": 0.1})
    return [
        _setting(scale, "one client", scale.base, rows),
        _setting(scale, "spread over three clients", scale.base, rows, spread),
    ]


def damping(scale: Scale) -> list[Setting]:
    """The damping's table."""
    return [
        _setting(scale, f"lambda={value:g}", scale.base, _changed(OURS, {"damping": value}))
        for value in (0.1, 0.01, 0.001)
    ]


def heterogeneity(scale: Scale) -> list[Setting]:
    """How unequal the clients are: Dirichlet's alpha."""
    return [
        _setting(scale, f"alpha={alpha}", dataclasses.replace(scale.base, alpha=alpha), OURS)
        for alpha in (0.1, 0.5, 1.0)
    ]


def clients(scale: Scale) -> list[Setting]:
    """How many clients there are."""
    counts = {"smoke": (4, 6), "small": (10, 20, 40), "paper": (10, 100, 200)}[scale.name]
    return [_setting(scale, f"{count} clients", scale.with_clients(count).base, OURS) for count in counts]


def wallclock(scale: Scale) -> list[Setting]:
    """Seconds for models of several sizes."""
    models = {
        "smoke": ("digits-net", "softmax"),
        "small": ("cnn-narrow", "cnn", "softmax") if scale.base.dataset != "digits" else ("digits-net", "softmax"),
        "paper": ("cnn", *LARGE),
    }[scale.name]
    return [_setting(scale, model, scale.on(scale.base.dataset, model).base, OURS) for model in models]


def functional(scale: Scale) -> list[Setting]:
    """The functional measures of the models of `main`."""
    return [_setting(scale, scale.base.dataset, scale.base, OURS)]


def convergence(scale: Scale) -> list[Setting]:
    """How far conjugate gradient gets, for two clients that leave: those of `main` and of `backdoor`."""
    contenders = _changed(OURS[:3], {"iterations": 6 if scale.is_smoke else 50})
    return [
        _setting(scale, "a clean client leaves", scale.base, contenders),
        _setting(scale, "a poisoned client leaves", scale.attacked(scale.leaver, strong=True), contenders),
    ]


def sequential(scale: Scale) -> list[Setting]:
    """Half of the clients leave one after another; three of them had hidden a backdoor, each with its own trigger."""
    count = {"smoke": 4, "small": 12, "paper": 20}[scale.name]
    leaving = [f"client-{number}" for number in range(1, count // 2 + 1)]
    strong = scale.backdoor(strong=True)
    corners: tuple[Corner, ...] = ("bottom-right", "top-left", "bottom-left")
    attackers = leaving[:: max(1, len(leaving) // 3)][:3]
    backdoors: Mapping[str, Backdoor] = {
        name: dataclasses.replace(strong, target=(7 + number) % 10, corner=corner, share=strong.share / 2)
        for number, (name, corner) in enumerate(zip(attackers, corners, strict=False))
    }
    scenario = dataclasses.replace(scale.with_clients(count).base, backdoors=backdoors)
    contenders, steps = (Contender("fine-tuning"), *OURS[1:]), [Forget((name,)) for name in leaving]
    return [_setting(scale, f"{len(leaving)} of {count} leave", scenario, contenders, *steps)]


def samples(scale: Scale) -> list[Setting]:
    """Some samples leave, their clients stay; at the paper's scale without the baselines that cost about a training."""
    cheap = ("gradient-ascent", "projected-gradient-ascent", "fine-tuning")
    baselines = tuple(c for c in BASELINES if scale.name != "paper" or c.method in cheap)
    able = (*baselines, *OURS[:2], Contender("hf-kcu+recovery"))
    everywhere = Forget(shares=dict.fromkeys(scale.base.names, 0.05))
    return [
        _setting(scale, "a fifth of one client", scale.base, able, Forget(shares={scale.leaver: 0.2})),
        _setting(scale, "a twentieth of every client", scale.base, able, everywhere),
        _setting(
            scale,
            "the poisoned samples",
            scale.attacked(scale.leaver, strong=True),
            able,
            Forget(triggered=(scale.leaver,)),
        ),
    ]


def several(scale: Scale) -> list[Setting]:
    """Several clients leave at once, one of them poisoned: the one of `backdoor`, and others with it."""
    counts = {"smoke": (2,), "small": (2, 3, 5), "paper": (2, 5)}[scale.name]
    scenario = scale.attacked(scale.leaver, strong=True)
    others = [name for name in scale.base.names[1:] if name != scale.leaver]  # settings were chosen on client 0
    return [
        _setting(
            scale,
            f"{count} at once",
            scenario,
            (Contender("fine-tuning"), *OURS),
            Forget((scale.leaver, *others[: count - 1])),
        )
        for count in counts
    ]


def adversary(scale: Scale) -> list[Setting]:
    """Retained clients that hold the leaver's trigger, and a leaver that lies about its gradient."""
    found = []
    leader, quiet = scale.backdoor(strong=True), scale.backdoor()
    quiet = dataclasses.replace(quiet, size=leader.size)  # the same trigger, nothing boosted
    for count in {"smoke": (1,), "small": (1, 2, 3), "paper": (1, 3)}[scale.name]:
        friends = [name for name in scale.base.names if name != scale.leaver][1 : 1 + count]
        scenario = dataclasses.replace(scale.base, backdoors={scale.leaver: leader, **dict.fromkeys(friends, quiet)})
        found.append(_setting(scale, f"{count} retained with the trigger", scenario, OURS))
    plain = scale.attacked(scale.leaver, strong=True)
    liars = (Contender("hf-kcu"), Contender("hf-kcu+recovery"))
    found += [_setting(scale, f"the leaver lies: {lie}", plain, liars, tamper=lie) for lie in LIES]
    return found


def fresh(scale: Scale) -> list[Setting]:
    """The default alone where it had never been run: a clean client leaves, and one with a strong backdoor."""
    found = []
    for dataset in _attacked(scale):
        own = scale.on(dataset)
        for label, scenario in (("clean", own.base), ("strong", own.attacked(own.leaver, strong=True))):
            setting = _setting(own, f"{dataset}, {label}", scenario, (DEFAULT,))
            found.append(dataclasses.replace(setting, retrains=scale.other_retrains))
    return found


def tried(scale: Scale) -> list[Setting]:
    """What was tried for the default step, on the client and the seeds that its settings were chosen on."""
    tuned = Forget(("client-0",))
    krylov = {"iterations": 20, "curvature_samples": 2000}
    contenders = (
        Contender("hf-kcu"),
        Contender("unfiltered+recovery"),
        Contender("retrace-krylov", label="Krylov, damped, ten products"),
        Contender("retrace-krylov", krylov, "Krylov, damped, twenty products"),
        Contender("retrace-krylov", {**krylov, "filter": "response"}, "Krylov, response, twenty products"),
        Contender("retrace-krylov", {"preconditioner_rank": 10}, "Krylov, damped, ten products and a sketch of ten"),
        *(
            Contender("retrace", {"correction": False, "filter": kind}, f"layers, {kind}")
            for kind in ("damped", "response")
        ),
        Contender("retrace", {"curvature_samples": 500}, "the default on a quarter of the samples"),
        DEFAULT,
        Contender("retrace+recovery"),
    )
    attacked = scale.attacked("client-0", strong=True)
    return [
        _setting(scale, "a clean client leaves", scale.base, contenders, tuned),
        _setting(scale, "a strong backdoor leaves", attacked, contenders, tuned),
    ]


def residual_curves(setting: Setting, finished: dict[str, Kept], _store: Store) -> list[Series]:
    """Relative residuals of each solve, and the theorem's bound with the condition that the solve itself estimates."""
    series = []
    for label, kept in finished.items():
        steps = kept.record["details"].get("steps", [{}])  # none where the method gave up
        for solver in steps[0].get("solves", {}).values():
            norms = solver["residual_norms"]
            if not norms[0]:
                continue
            x = [float(number) for number in range(len(norms))]
            relative = [norm / norms[0] for norm in norms]
            series.append(Series(label, setting.label, "iteration", "relative residual", x, relative))
            if solver["condition_estimate"] and label == "hf-kcu":
                bound = [min(1.0, cg_rate(solver["condition_estimate"], number)) for number in range(len(norms))]
                series.append(Series("bound", setting.label, "iteration", "relative residual", x, bound))
    return series


def _changed(contenders: tuple[Contender, ...], options: Mapping[str, object]) -> tuple[Contender, ...]:
    return tuple(dataclasses.replace(c, options={**c.options, **options}) for c in contenders)


def _nothing(_scale: Scale) -> list[Setting]:
    return []


def _verdicts(
    scale: Scale, seeds: Sequence[int], store: Store, workers: int | None, progress: Progress | None
) -> Results:
    run = partial(run_verdicts, seeds, workers=workers, progress=progress, store=store)
    if scale.is_smoke:
        return run(retrains=RETRAINS, cheated_seeds=1, clean_seeds=1, draws=50)
    return run(fashion=fashion_scenario(store.data_dir))


def _evidence(
    scale: Scale, seeds: Sequence[int], store: Store, workers: int | None, progress: Progress | None
) -> Results:
    retrains = 3 if scale.is_smoke else TEN
    return run_evidence(seeds, retrains=retrains, workers=workers, progress=progress, store=store)


def _text(scale: Scale, seeds: Sequence[int], store: Store, _workers: int | None, progress: Progress | None) -> Results:
    return run_text(seeds, *text_scale(scale.name, store.data_dir), store, progress)


def _tofu(scale: Scale, seeds: Sequence[int], store: Store, _workers: int | None, progress: Progress | None) -> Results:
    return run_tofu(seeds, *tofu_scale(scale.name, store.data_dir), store, progress)


def _experiment(function: Callable[[Scale], list[Setting]], title: str) -> Experiment:
    return Experiment(function.__name__, title, function)


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        dataclasses.replace(
            _experiment(main, "A clean client leaves: every method, what it reaches and what it costs"), seeds=FIVE
        ),
        _experiment(datasets, "Other data, other models"),
        dataclasses.replace(
            _experiment(backdoor, "A poisoned client leaves: the printed attack and a strong one"), seeds=FIVE
        ),
        _experiment(components, "What each component does"),
        _experiment(damping, "How much damping"),
        _experiment(heterogeneity, "How unequal the clients are"),
        _experiment(clients, "How many clients there are"),
        _experiment(wallclock, "Seconds, for models of several sizes"),
        _experiment(functional, "How differently the models answer"),
        dataclasses.replace(_experiment(convergence, "How fast conjugate gradient converges"), curves=residual_curves),
        Experiment("conditioning", "Iterations against the condition number", _nothing, study=conditioning),
        _experiment(sequential, "Half of the clients leave, one after another"),
        _experiment(samples, "Samples leave, their clients stay"),
        _experiment(several, "Several clients leave at once"),
        dataclasses.replace(
            _experiment(colluders, "Two clients with one trigger leave clients that have few labels each"),
            seeds=COLLUDERS_SEEDS,
        ),
        dataclasses.replace(_experiment(adversary, "Clients that collude and clients that lie"), study=perturbation),
        dataclasses.replace(_experiment(insiders, "Attackers who know the method"), seeds=INSIDERS_SEEDS),
        dataclasses.replace(_experiment(trainings, "Other optimisers, schedules and server rules"), seeds=UNSEEN),
        dataclasses.replace(
            _experiment(response, "How much of a pull is left, by curvature: measured, and by the training's response"),
            curves=responses,
            apart=True,
            seeds=RESPONSE_SEEDS,
        ),
        dataclasses.replace(
            _experiment(persistence, "What comes back when those who stay go on"), seeds=PERSISTENCE_SEEDS
        ),
        dataclasses.replace(_experiment(replay, "Samples, and clients without vectors, by replay"), seeds=UNSEEN),
        HOSPITALS,
        dataclasses.replace(_experiment(fresh, "The default on seeds that it had never been run on"), seeds=FRESH),
        dataclasses.replace(_experiment(tried, "What was tried, where the settings were chosen"), seeds=TUNING),
        Experiment(
            "verdict",
            "What a verdict catches: honest retrains, tricks and cheats",
            _nothing,
            whole=_verdicts,
            seeds={"smoke": SEEDS[:3], "small": SEEDS, "paper": SEEDS},
        ),
        Experiment(
            "evidence",
            "What evidence without retrained models supports",
            _nothing,
            whole=_evidence,
            seeds={"smoke": EVIDENCE_SEEDS[:1], "small": EVIDENCE_SEEDS, "paper": EVIDENCE_SEEDS},
        ),
        Experiment("text", "A speaker and its secrets leave a language model", _nothing, whole=_text, seeds=TEXT_SEEDS),
        Experiment(
            "tofu",
            "Who knows some authors leaves a language model's adapters",
            _nothing,
            whole=_tofu,
            seeds=TOFU_SEEDS,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of that name; an unknown one is refused with the known ones listed.

    Example:
        >>> experiment("backdoor").title
        'A poisoned client leaves: the printed attack and a strong one'
    """
    if name not in EXPERIMENTS:
        raise RequestError(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
