"""The filter taken apart layer by layer, beside dense algebra; and what is chosen where nothing is said."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Layout, Snapshot
from expunge.errors import ModelError, RequestError
from expunge.federation.engines.engine import ask_factors
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import CurvatureFactors, Draw
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.federation.training.recipe import Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round, Work
from expunge.unlearning.lengths import LENGTHS, longest_safe
from expunge.unlearning.one_layer import CHECKED
from expunge.unlearning.repair import Correction
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from unlearning.convex import ConvexFederation, ridge
from unlearning.presets import KRYLOV, RETRACE, forgotten

LEAVER = Request.of("client-0")
SCHEDULE = Schedule(learning_rate=0.1, local_steps=5, rounds=4)
RESPONSE = Response(Recipe(), (Round((Work(1.0, 0.1, 5),)),) * 4)
"""The same, as those who stay answer."""


def sent(datasets) -> list[dict[str, Tensor]]:
    """Updates of any kind, round by round."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: torch.randn(18, generator=generator, dtype=torch.float64) for name in datasets}
        for _ in range(SCHEDULE.rounds)
    ]


def many(copies: int = 300) -> tuple[ConvexFederation, ServerState]:
    """Ridge regression, its samples repeated until what is drawn averages out, and vectors of any kind."""
    few = ridge(3)
    datasets = {name: (x.repeat(copies, 1), y.repeat(copies, 1)) for name, (x, y) in few.datasets.items()}
    federation = ConvexFederation(SquaredError(l2=0.05), datasets, outputs=3)
    memory = Memory()
    for updates in sent(datasets):
        memory.record(updates, {name: len(x) for name, (x, _) in datasets.items()})
    theta = Snapshot(torch.zeros(18, dtype=torch.float64), {}, Layout.of(federation.model))
    return federation, ServerState(theta, SCHEDULE, memory)


def retained_matrix(federation: ConvexFederation) -> Tensor:
    """The retained clients' curvature written out: G = I x E[a a'] + l2 for squared error."""
    inputs, _ = federation.pooled({"client-0": None})
    matrix = torch.kron(torch.eye(3, dtype=torch.float64), inputs.T @ inputs / len(inputs))
    return matrix + 0.05 * torch.eye(18, dtype=torch.float64)


def pulls_of(federation: ConvexFederation) -> Tensor:
    """What client-0 did to the mean update, a row for each round."""
    counts = {name: len(x) for name, (x, _) in federation.datasets.items()}
    total, rows = sum(counts.values()), []
    for updates in sent(federation.datasets):
        mean = sum(counts[name] / total * update for name, update in updates.items())
        rows.append(counts["client-0"] / total * (updates["client-0"] - mean) / (1 - counts["client-0"] / total))
    return torch.stack(rows)


def dense_step(federation: ConvexFederation, kind: str) -> Tensor:
    """f(G) A with dense algebra: one vector stands for all rounds, spread over them as long as the pulls were."""
    values, vectors = torch.linalg.eigh(retained_matrix(federation))
    assert float(values.max()) < 20  # else those who stay would not converge
    pulls, contraction = pulls_of(federation), (1 - 0.1 * values) ** 5
    lengths = pulls.norm(dim=1) / pulls.norm(dim=1).sum()
    answered = sum(lengths[number] * contraction ** (3 - number) for number in range(4))
    left = {"damped": 0.5 / (values + 0.5), "response": answered}[kind]  # 1 / (0.1 x 5 x 4)
    return vectors @ (left * (vectors.T @ pulls.sum(dim=0)))


@pytest.mark.parametrize("kind", ["damped", "response"])
def test_on_one_linear_layer_it_is_the_dense_filter(kind):
    federation, state = many()
    options = dataclasses.replace(RETRACE, filter=kind, curvature_samples=None, tau=None)
    outcome = forgotten(federation.engine().without(("client-0",)), state, LEAVER, options)
    moved, exact = outcome.state.model.parameters - state.model.parameters, dense_step(federation, kind)
    assert float((moved + exact).norm() / exact.norm()) < 0.02
    # And Krylov, run to its end, is the same filter by another way.
    krylov = dataclasses.replace(KRYLOV, filter=kind, curvature_samples=None, tau=None, iterations=18)
    other = forgotten(federation.engine(), state, LEAVER, krylov).state.model.parameters - state.model.parameters
    assert float((moved - other).norm() / other.norm()) < 0.02


def test_factors_are_averaged_over_samples_not_over_clients():
    federation = ridge(3)
    model = Snapshot(torch.zeros(18, dtype=torch.float64), {}, Layout.of(federation.model))
    names = ["client-1", "client-4"]
    found = ask_factors(federation.engine(), {name: CurvatureFactors(model, seed=0) for name in names})
    rows = torch.cat([federation.datasets[name][0] for name in names])
    torch.testing.assert_close(found.values[:21], (rows.T @ rows / len(rows))[tuple(torch.triu_indices(6, 6))])
    left_out = {name: CurvatureFactors(model, seed=0, exclude=(0, 1)) for name in names}
    rows = torch.cat([federation.datasets[name][0][2:] for name in names])
    found = ask_factors(federation.engine(), left_out)
    torch.testing.assert_close(found.values[:21], (rows.T @ rows / len(rows))[tuple(torch.triu_indices(6, 6))])


def test_it_costs_one_gradient_a_sample_and_one_message():
    federation, state = many(copies=10)
    engine = federation.engine()
    engine.ask({name: CurvatureFactors(state.model, 0, Draw(20, 0)) for name in ("client-1", "client-2")})
    assert (engine.cost.sample_gradients, engine.cost.rounds) == (40, 1)
    outcome = forgotten(federation.engine(), state, LEAVER, dataclasses.replace(RETRACE, tau=None))
    assert outcome.cost.rounds == 1
    retained = sum(len(x) for name, (x, _) in federation.datasets.items() if name != "client-0")
    assert outcome.details["curvature_samples"] == outcome.cost.sample_gradients == retained < 1500
    federation, state = many(copies=30)
    assert forgotten(federation.engine(), state, LEAVER, RETRACE).details["curvature_samples"] == 1500


def test_the_whole_step_is_tried_before_shorter_ones():
    federation, state = many(copies=10)
    roomy = forgotten(federation.engine(), state, LEAVER, dataclasses.replace(RETRACE, tau=1e6))
    assert roomy.details["steps"][0]["length"] == 1.0
    assert roomy.cost.rounds == 2 + CHECKED + 2 + 2  # that it is a squared error, a short round, and a correction
    tight = forgotten(federation.engine(), state, LEAVER, dataclasses.replace(RETRACE, tau=0.01))
    assert tight.details["steps"][0]["length"] < 1.0
    assert tight.cost.rounds <= RETRACE.expected_rounds


HARDLY = (0.0, 2.0**-6)  # hardly anything can be repaired
NEAR = {"long_step_ratio": math.inf}  # no step is a long one


def taken(**options) -> dict:
    federation, state = many(copies=10)
    outcome = forgotten(federation.engine(), state, LEAVER, dataclasses.replace(RETRACE, **options))
    assert outcome.cost.rounds <= dataclasses.replace(RETRACE, **options).expected_rounds
    return {**outcome.details["steps"][0], "correction": outcome.details.get("correction")}


def rise_and_tau(share: float) -> tuple[float, float]:
    """What the whole response costs those who stay, and the tau under which so large a share of it is allowed.

    Allowed are tau and what its own curvature lets the step cost, but that no more than four times tau.
    """
    federation, state = many(copies=10)
    options = dataclasses.replace(RETRACE, filter="response", tau=1e6, correction=False)
    outcome = forgotten(federation.engine(), state, LEAVER, options)
    step = outcome.state.model.parameters - state.model.parameters
    expected = float(step @ retained_matrix(federation) @ step) / 2
    rise = outcome.details["steps"][0]["retained_rise"]
    assert rise > expected > 0
    return rise, max(share * rise - expected, share * rise / 5)


def test_a_step_that_is_corrected_may_cost_more_at_first_but_not_in_the_end():
    rise, tau = rise_and_tau(0.4)  # the whole step costs more than is allowed, but less than three times that
    plain = taken(tau=tau, filter="response", correction=False)
    assert plain["length"] < 1.0
    assert plain["retained_rise"] <= 0.4 * rise
    mended = taken(tau=tau, **NEAR)
    assert (mended["filter"], mended["length"]) == ("response", 1.0)
    assert mended["retained_rise"] == rise
    assert mended["correction"]["length"] > 0
    assert mended["retained_rise"] + mended["correction"]["retained_rise"] <= 0.4 * rise


def test_the_gentler_filter_is_taken_where_the_sharper_one_costs_too_much():
    rise, tau = rise_and_tau(0.9)
    uncorrected = taken(tau=tau, correction=False)
    assert (uncorrected["filter"], uncorrected["length"]) == ("gentle", 1.0)
    assert 0 < uncorrected["retained_rise"] < 0.9 * rise
    loose = taken(tau=rise_and_tau(1.1)[1], correction=False)
    assert (loose["filter"], loose["length"]) == ("response", 1.0)
    strict = taken(tau=rise_and_tau(0.3)[1])  # not even three times that is enough for the sharper one
    assert strict["filter"] == "gentle"
    assert strict["retained_rise"] <= 0.3 * rise


def test_the_gentler_filter_is_the_response_to_four_times_the_curvature():
    federation, state = many()
    _, tau = rise_and_tau(0.9)
    options = dataclasses.replace(RETRACE, tau=tau, correction=False, curvature_samples=None)
    outcome = forgotten(federation.engine(), state, LEAVER, options)
    assert outcome.details["steps"][0]["filter"] == "gentle"
    values, vectors = torch.linalg.eigh(retained_matrix(federation))
    pulls, contraction = pulls_of(federation), (1 - 0.1 * 4 * values) ** 5
    assert float((0.1 * 4 * values).max()) < 2
    lengths = pulls.norm(dim=1) / pulls.norm(dim=1).sum()
    left = sum(lengths[number] * contraction ** (3 - number) for number in range(4))
    exact = vectors @ (left * (vectors.T @ pulls.sum(dim=0)))
    moved = outcome.state.model.parameters - state.model.parameters
    assert float((moved + exact).norm() / exact.norm()) < 0.02


def test_where_a_correction_does_not_bring_it_back_the_gentler_filter_is_taken():
    rise, tau = rise_and_tau(0.4)
    assert taken(tau=tau, **NEAR)["filter"] == "response"
    step = taken(tau=tau, **NEAR, correction_lengths=HARDLY)
    assert step["filter"] == "gentle"
    assert step["retained_rise"] <= 0.4 * rise


def test_what_is_chosen_where_nothing_is_said():
    federation, state = many(copies=2)
    roomy = dataclasses.replace(RETRACE, tau=1e6)
    details = forgotten(federation.engine(), state, LEAVER, roomy).details
    assert (details["source"], details["solver"], details["steps"][0]["filter"]) == (
        "recorded",
        "kronecker",
        "response",
    )
    bare = dataclasses.replace(state, schedule=None)
    given = dataclasses.replace(roomy, damping=0.1)
    moved = {}
    for name, own in (("known", state), ("bare", bare)):  # a damping that is given is used
        outcome = forgotten(federation.engine(), own, LEAVER, given)
        assert (outcome.details["solver"], outcome.details["steps"][0]["filter"]) == ("kronecker", "damped")
        moved[name] = outcome.details["steps"][0]["norm"]
    assert moved["known"] == pytest.approx(moved["bare"], rel=1e-12)


def test_what_cannot_be_is_refused():
    federation, state = many(copies=2)
    with pytest.raises(RequestError, match="damping above 0"):
        forgotten(federation.engine(), state, LEAVER, dataclasses.replace(RETRACE, damping=0.0))
    unknown = dataclasses.replace(state, model=dataclasses.replace(state.model, layout=None))
    with pytest.raises(ModelError, match="layer by layer"):
        forgotten(federation.engine(), unknown, LEAVER, RETRACE)
    bare, engine = dataclasses.replace(state, schedule=None), federation.engine()
    with pytest.raises(RequestError, match="response needs its learning rate"):
        forgotten(engine, bare, LEAVER, dataclasses.replace(RETRACE, filter="response"))
    with pytest.raises(RequestError, match="Give a damping"):
        forgotten(engine, bare, LEAVER, RETRACE)
    assert engine.cost.rounds == 0


def test_a_client_that_pulled_alone_is_taken_back_whole():
    """A network whose retained clients do not feel the leaver's direction: all of its pull goes, as far as it reaches.

    It pulled a little louder than the others, so a little more than all of it goes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    generator = torch.Generator().manual_seed(1)
    datasets = {}
    for number in range(4):
        inputs = torch.randn(80, 4, generator=generator)
        inputs[:, 0] = 1.0 if number == 0 else 0.0  # only the leaver has the first feature
        datasets[f"client-{number}"] = (inputs, (inputs[:, 1] > 0).long())
    engine = LocalEngine(model, CrossEntropy(), datasets)
    start = Snapshot.of(model)
    state = train(engine, start, TrainingPlan(rounds=5, epochs=2, batch_size=16, learning_rate=0.2))
    by_factors = dataclasses.replace(RETRACE, long_step_ratio=math.inf)
    outcome = forgotten(engine.without(("client-0",)), state, LEAVER, by_factors)
    column = {
        name: state_.layers().unflatten(state_.parameters)["0.weight"][:, 0]
        for name, state_ in (("start", start), ("trained", state.model), ("forgot", outcome.state.model))
    }
    moved, left = column["trained"] - column["start"], column["forgot"] - column["start"]
    assert float(moved.norm()) > 1e-3
    reach = outcome.details["reach"]
    assert reach == pytest.approx(1 + 0.1 * (state.memory.loudness(["client-0"]) - 1))
    assert 1.0 < reach < 1.2
    assert float((left - (1 - reach) * moved).norm() / moved.norm()) < 1e-4
    by_krylov = forgotten(engine, state, LEAVER, dataclasses.replace(KRYLOV, iterations=30, curvature_samples=None))
    both = [o.state.model.parameters - state.model.parameters for o in (outcome, by_krylov)]
    assert float(torch.cosine_similarity(*both, dim=0)) > 0.9


def test_the_longest_safe_length_is_taken():
    federation, state = many(copies=10)
    engine, step = federation.engine(), state.memory.influence(["client-0"])
    parties = LEAVER.parties(engine.clients())
    stay = Retained(engine, parties.retained, parties.counts)
    rises = stay.losses(state.model, step, (0.0, *LENGTHS)).rises[1:]
    for allowed in rises:
        longest = next(length for length, rise in zip(LENGTHS, rises, strict=True) if rise <= allowed)
        assert longest_safe(stay.trials(state.model, step, LENGTHS), allowed)[0].length == longest


def test_the_correction_knows_what_the_step_has_cost(monkeypatch):
    known = []

    def watched(self, stay, moved):
        known.append(moved.risen)
        return answer(self, stay, moved)

    answer = Correction.__call__
    monkeypatch.setattr(Correction, "__call__", watched)
    step = taken(tau=1e6, **NEAR)
    assert known == [step["retained_rise"]] != [0.0]


@pytest.mark.parametrize("tau", [0.0, 0.001, 0.01])
def test_expected_rounds_is_an_upper_bound_without_a_correction_too(tau):
    federation, state = many(copies=10)
    options = dataclasses.replace(RETRACE, tau=tau, correction=False)
    assert forgotten(federation.engine(), state, LEAVER, options).cost.rounds <= options.expected_rounds


def test_a_try_that_was_given_up_leaves_no_record():
    federation, state = many(copies=10)
    _, tau = rise_and_tau(0.4)
    options = dataclasses.replace(RETRACE, **NEAR, filter="response", tau=tau, correction_lengths=HARDLY)
    only_whole = dataclasses.replace(options, lengths=(1.0,))  # nothing shorter is safe
    outcome = forgotten(federation.engine(), state, LEAVER, only_whole)
    assert not outcome.succeeded
    assert "correction" not in outcome.details
