"""No option does nothing: for every option of every method a case in which it changes the outcome, or it is refused."""

import dataclasses
import inspect
import math
import pkgutil
from importlib import import_module

import pytest

import expunge.unlearning
from expunge.core.vectors import Snapshot
from expunge.errors import RequestError
from expunge.federation.training.fedavg import Keep
from expunge.unlearning.hf_kcu_options import HfKcuOptions
from expunge.unlearning.hf_kcu_paper_options import HfKcuPaperOptions
from expunge.unlearning.recovery import Recovery
from expunge.unlearning.registry import methods
from expunge.unlearning.request import Request
from expunge.unlearning.retrace_options import RetraceKrylovOptions, RetraceOptions
from federation.small import mlp
from unlearning.test_common import PLAN, federation

SOME = Request.of(samples={"ada": [0, 1, 2, 3], "bob": [0]})
"""Two owners with unequal shares: weights between them count."""
LOCAL = {"epochs": {"epochs": 2}, "learning_rate": {"learning_rate": 0.01}, "batch_size": {"batch_size": 3}}
SEED = {"seed": {"seed": 5}}
STEP = {
    "damping": {"damping": 0.7},
    "curvature_samples": {"curvature_samples": 6},
    "tau": {"tau": None},
    "lengths": {"lengths": (0.3,)},
    "recovery": {"recovery": True},
    "missing": {"missing": "leave-out"},
    "seed": {"seed": 5},
}
CASES = {
    "auto": STEP,
    "hf-kcu": {
        **STEP,
        "gradient_of": {"gradient_of": "retained"},
        "causal_weights": {"causal_weights": "uniform"},
        "curvature_of": {"curvature_of": "everyone"},
        "curvature": {"curvature": "hessian"},
        "negative_curvature": {"negative_curvature": "ignore"},
        "iterations": {"iterations": 2},
        "tolerance": {"tolerance": 0.5},
        "preconditioner_rank": {"preconditioner_rank": 3},
        "influence_decay": {"influence_decay": False},
        "steps": {"steps": 2},
    },
    "hf-kcu-paper": {
        "iterations": {"iterations": 1},
        "damping": {"damping": 5.0},
        "beta": {"beta": None},
        "causal_weights": {"causal_weights": "uniform"},
        "influence_decay": {"influence_decay": False},
        "recovery": {"recovery": True},
    },
    "retrace": {
        **STEP,
        "source": {"source": "replay"},
        "filter": {"filter": "damped"},
        "correction": {"correction": False},
        "coupled": {"coupled": True},
        "correction_lengths": {"correction_lengths": (0.0, 0.001)},
        "long_step_ratio": {"long_step_ratio": math.inf},
        "round_lengths": {"round_lengths": (0.0, 0.001)},
    },
    "retrace-krylov": {
        **STEP,
        "filter": {"filter": "response"},
        "iterations": {"iterations": 1},
        "tolerance": {"tolerance": 0.5},
        "preconditioner_rank": {"preconditioner_rank": 3},
    },
    "do-nothing": {},
    "retrain": {
        "start": {"start": Snapshot.of(mlp(seed=8))},
        "plan": {"plan": dataclasses.replace(PLAN, rounds=1)},
        "keep": {"keep": Keep(vectors=False)},
        "same_draws": {"same_draws": True},
        "progress": {},
    },
    "sisa": {"progress": {}},
    "fed-eraser": {**LOCAL, **SEED},
    "fine-tuning": {**LOCAL, **SEED, "rounds": {"rounds": 2}},
    "fine-tuning-same-budget": {**LOCAL, **SEED, "budget": {"budget": 33}},
    "not": {**LOCAL, **SEED, "rounds": {"rounds": 2}},
    "gradient-ascent": {**LOCAL, **SEED, "max_norm": {"max_norm": 0.1}},
    "fed-osd": {
        **LOCAL,
        **SEED,
        "unlearning_rounds": {"unlearning_rounds": 1},
        "recovery_rounds": {"recovery_rounds": 0},
    },
    "projected-gradient-ascent": {
        **LOCAL,
        **SEED,
        "local_epochs": {"local_epochs": 3},
        "ascent_epochs": {"ascent_epochs": 1},
        "max_norm": {"max_norm": 0.1},
        "radius": {"radius": 0.01},
        "stop_accuracy": {"stop_accuracy": None},
        "recovery_rounds": {"recovery_rounds": 0},
    },
}
BASE = {  # where an option matters only beside others
    ("retrain", ""): {"start": Snapshot.of(mlp()), "plan": PLAN},
    ("retrain", "same_draws"): {"plan": dataclasses.replace(PLAN, participation=0.5)},
    ("fine-tuning-same-budget", ""): {"budget": 77},
    ("hf-kcu", "negative_curvature"): {"curvature": "hessian", "iterations": 30, "damping": 1e-6},
    ("hf-kcu", "seed"): {"curvature_samples": 6},
    ("retrace-krylov", "seed"): {"curvature_samples": 6},
    ("retrace", "damping"): {"filter": "damped"},
    ("retrace", "correction"): {"tau": 0.001, "long_step_ratio": 0.1},
    ("retrace", "correction_lengths"): {"tau": 0.0, "long_step_ratio": math.inf},
    ("retrace", "round_lengths"): {"long_step_ratio": 0.0},
    ("projected-gradient-ascent", "ascent_epochs"): {"stop_accuracy": None},
}
SAMPLES = {("hf-kcu", "causal_weights"), ("hf-kcu-paper", "causal_weights")}


def ran(name, options, request):
    """Everything that an outcome is, or the sentence of its refusal."""
    _, _, engine, state = federation(mlp, name)
    if "missing" in options or options.get("__away"):
        engine = engine.without(("dan",))
    options = {key: value for key, value in options.items() if key != "__away"}
    try:
        outcome = methods()[name].configured(options)(engine, state, request)
    except RequestError as problem:
        return str(problem)
    kept = None if outcome.memory is None else outcome.memory.clients
    return outcome.method, outcome.state.model.digest, outcome.cost.sample_gradients, outcome.cost.rounds, kept


PAIRS = [(name, option) for name, cases in CASES.items() for option in cases]


def test_every_method_and_every_option_has_its_case():
    plain = {name for name in methods() if not name.endswith("+recovery")}
    assert set(CASES) == plain
    for name in plain:
        assert set(CASES[name]) == {part.name for part in dataclasses.fields(methods()[name].options)}, name


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_it_changes_the_outcome(name, option):
    base = {**BASE.get((name, ""), {}), **BASE.get((name, option), {})}
    request = SOME if (name, option) in SAMPLES else Request.of("ada")
    if option == "progress":
        told = []
        ran(name, {**base, "progress": lambda *said: told.append(said)}, request)
        assert told
        return
    if option == "lengths":
        base |= {"tau": 0.0}
    away = {"__away": True} if option == "missing" else {}
    before, after = ran(name, {**base, **away}, request), ran(name, {**base, **CASES[name][option]}, request)
    assert before != after
    assert isinstance(before, str) == (option == "missing"), before
    if option != "missing":
        assert not isinstance(after, str), after


@pytest.mark.parametrize(
    ("options", "changes", "said"),
    [
        (HfKcuOptions, {"gradient_of": "retained", "causal_weights": "uniform"}, "causal_weights would change nothing"),
        (HfKcuOptions, {"negative_curvature": "ignore"}, "negative_curvature would change nothing"),
        (HfKcuOptions, {"influence_decay": False, "iterations": 3}, "iterations would change nothing"),
        (HfKcuOptions, {"influence_decay": False, "tolerance": 0.1}, "tolerance would change nothing"),
        (HfKcuOptions, {"influence_decay": False, "curvature": "hessian"}, "curvature would change nothing"),
        (HfKcuOptions, {"tau": None, "lengths": (0.5,)}, "lengths would change nothing"),
        (HfKcuPaperOptions, {"influence_decay": False, "iterations": 3}, "iterations would change nothing"),
        (RetraceOptions, {"correction": False, "long_step_ratio": 0.5}, "long_step_ratio would change nothing"),
        (RetraceOptions, {"tau": None, "correction_lengths": (0.0,)}, "correction_lengths would change nothing"),
        (
            RetraceKrylovOptions,
            {"filter": "response", "preconditioner_rank": 3},
            "preconditioner_rank would change nothing",
        ),
        (RetraceKrylovOptions, {"filter": "response", "tolerance": 0.1}, "tolerance would change nothing"),
        (RetraceKrylovOptions, {"filter": "none", "iterations": 3}, "iterations would change nothing"),
        (RetraceKrylovOptions, {"filter": "none", "damping": 0.1}, "damping would change nothing"),
        (RetraceKrylovOptions, {"filter": "response", "damping": 0.1}, "damping would change nothing"),
        (RetraceOptions, {"filter": "response", "damping": 0.1}, "damping would change nothing"),
    ],
)
def test_where_it_cannot_it_is_refused(options, changes, said):
    with pytest.raises(RequestError, match=said) as caught:
        options(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "wrong", "said"),
    [
        (HfKcuOptions, {"iterations": 0}, "iterations must be at least 1"),
        (HfKcuOptions, {"iterations": True}, "iterations must be at least 1"),
        (HfKcuOptions, {"damping": -0.1}, "damping must be a number of at least 0"),
        (HfKcuOptions, {"damping": math.nan}, "damping must be a number"),
        (HfKcuOptions, {"damping": "much"}, "damping must be a number"),
        (HfKcuOptions, {"curvature_samples": 0}, "curvature_samples must be at least 1"),
        (HfKcuOptions, {"curvature_samples": "all"}, "curvature_samples must be at least 1"),
        (HfKcuOptions, {"preconditioner_rank": 1.5}, "preconditioner_rank must be at least 0"),
        (HfKcuOptions, {"curvature": "fisher"}, "curvature can be ggn, hessian"),
        (HfKcuOptions, {"missing": "maybe"}, "missing can be refuse, leave-out"),
        (HfKcuPaperOptions, {"causal_weights": "share"}, "causal_weights can be gradient-norm, uniform, none"),
        (RetraceOptions, {"tau": -1.0}, "tau must be"),
        (RetraceOptions, {"filter": "comb"}, "filter can be auto, response, damped"),
        (RetraceOptions, {"long_step_ratio": math.nan}, "long_step_ratio must be a number of at least 0"),
        (RetraceOptions, {"tau": True}, "tau must be a number"),
        (RetraceOptions, {"seed": "a"}, "seed must be at least 0"),
        (RetraceOptions, {"correction": "no"}, "correction is True or False"),
        (HfKcuOptions, {"influence_decay": "no"}, "influence_decay is True or False"),
        (HfKcuOptions, {"tolerance": None}, "tolerance must be a number"),
        (HfKcuPaperOptions, {"damping": None}, "damping must be a number"),
        (HfKcuPaperOptions, {"influence_decay": "no"}, "influence_decay is True or False"),
        (HfKcuPaperOptions, {"influence_decay": False, "damping": 0.0}, "give a damping above 0"),
        (RetraceOptions, {"lengths": ()}, "lengths takes one or more numbers"),
        (RetraceOptions, {"lengths": 0.5}, "lengths takes one or more numbers"),
        (HfKcuOptions, {"seed": 1.5}, "seed must be at least 0, a whole number"),
        (RetraceOptions, {"lengths": (1.0, -1.0)}, "lengths takes one or more numbers above 0"),
        (RetraceOptions, {"lengths": (0.0,)}, "lengths takes one or more numbers above 0"),
        (RetraceOptions, {"lengths": (0.1, 1.0)}, "longest first"),
        (RetraceOptions, {"lengths": (1.0, 1.0)}, "longest first"),
        (RetraceOptions, {"round_lengths": (0.0, math.inf)}, "round_lengths takes numbers"),
        (RetraceOptions, {"round_lengths": (0.5, 1.0)}, "round_lengths takes numbers that begin with 0"),
        (RetraceOptions, {"correction_lengths": (0.5, 1.0)}, "correction_lengths takes numbers that begin with 0"),
        (RetraceOptions, {"correction_lengths": (0.0, 1.0, 0.5)}, "begin with 0 and rise"),
        (Recovery, {"lengths": (0.0, -1.0)}, "begin with 0 and rise"),
        (Recovery, {"lengths": (0.0, math.nan)}, "begin with 0 and rise"),
        (Recovery, {"epochs": 1.5}, "epochs must be at least 1"),
        (Recovery, {"batch_size": 0}, "batch_size must be at least 1"),
        (Recovery, {"learning_rate": 0.0}, "learning_rate must be above 0"),
        (Recovery, {"seed": -1}, "seed must be at least 0"),
        (RetraceKrylovOptions, {"filter": "auto"}, "filter can be damped, response, none"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, wrong, said):
    with pytest.raises(RequestError, match=said) as caught:
        options(**wrong)
    assert "\n" not in str(caught.value)


def functions():
    """Every function and method that is written in the room."""
    for module in pkgutil.iter_modules(expunge.unlearning.__path__, "expunge.unlearning."):
        for _, found in inspect.getmembers(import_module(module.name)):
            if getattr(found, "__module__", "") != module.name:
                continue
            if inspect.isfunction(found):
                yield found
            elif inspect.isclass(found):
                yield from (
                    own
                    for name, own in vars(found).items()
                    if inspect.isfunction(own) and (not name.startswith("__") or name == "__call__")
                )


def test_no_function_has_more_than_six_parameters_or_hands_keywords_on():
    found = list(functions())
    assert len(found) > 80
    for function in found:
        parameters = inspect.signature(function).parameters.values()
        assert len(parameters) <= 6, function.__qualname__
        assert not any(own.kind is own.VAR_KEYWORD for own in parameters), function.__qualname__
