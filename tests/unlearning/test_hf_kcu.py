"""The algorithm's parts: causal weights and isolation, scaling, sources, switches, buffers, the safety belt."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from expunge.auditing.functional import mean_loss, predict
from expunge.bench.experiments import ABLATION
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import ModelError, NumericalError, RequestError
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.memory import Memory
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import CurvatureProduct, LocalSolve, Losses, NormStatistics
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.federation.training.recipe import FedAvg, FedAvgM, Recipe
from expunge.unlearning.lengths import LENGTHS, longest_safe
from expunge.unlearning.owners import causal_weights
from expunge.unlearning.preparation import prepared
from expunge.unlearning.recovery import Recovery, without_return
from expunge.unlearning.registry import method
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from unlearning.convex import digits_softmax, ridge, ridge_closed_form
from unlearning.presets import CORRECTED, KRYLOV, PAPER, RETRACE, forgotten, label, recovering

WHOLE = {"curvature_samples": None, "iterations": 100, "tolerance": 1e-12}


class WatchedEngine(LocalEngine):
    """Remembers who was asked what."""

    def ask(self, tasks):
        self.__dict__.setdefault("log", []).append(dict(tasks))
        return super().ask(tasks)


def watched(federation) -> WatchedEngine:
    return WatchedEngine(federation.model, federation.loss, federation.datasets)


@pytest.mark.parametrize(("server", "said"), [(FedAvg(), False), (FedAvgM(momentum=0.0), False), (FedAvgM(), True)])
def test_a_server_momentum_is_told_since_the_step_knows_of_none(server, said):
    federation = ridge(0)
    state = federation.state(ridge_closed_form(federation, {}), schedule=Schedule(0.1, 5, 20))
    state = dataclasses.replace(state, recipe=Recipe(server=server))
    outcome = forgotten(federation.engine(), state, Request.of("client-1"), CORRECTED)
    assert any("The server had a momentum" in each for each in outcome.warnings) == said


def trained_ridge(seed=0):
    federation = ridge(seed)
    return federation, federation.state(ridge_closed_form(federation, {}), schedule=Schedule(0.1, 5, 20))


def test_clients_outside_the_request_contribute_exactly_zero_as_printed():
    federation, state = trained_ridge()
    copies = {name: tuple(t.clone() for t in data) for name, data in federation.datasets.items()}
    engine = watched(federation)
    outcome = forgotten(engine, state, Request.of(samples={"client-1": [0, 1], "client-3": [4]}), PAPER)
    contributions = outcome.details["steps"][0]["contributions"]
    assert {name for name, value in contributions.items() if value == 0.0} == {"client-0", "client-2", "client-4"}
    assert contributions["client-1"] > 0 < contributions["client-3"]
    assert [set(round_) for round_ in engine.log] == [{"client-1", "client-3"}]
    assert all(isinstance(task, LocalSolve) for task in engine.log[0].values())
    for name, data in federation.datasets.items():
        assert all(torch.equal(now, then) for now, then in zip(data, copies[name], strict=True))


def test_the_printed_update_by_hand_with_two_owners():
    """Algorithm 1 with dense algebra: own Hessians, gradient-norm weights, beta cap, aggregation by w_i, minus sign."""
    federation, state = trained_ridge()
    owned = {"client-1": [0, 1], "client-3": [4]}
    options = dataclasses.replace(PAPER, iterations=100)
    found = forgotten(federation.engine(), state, Request.of(samples=owned), options).state.model.parameters
    theta = state.model.parameters
    counts = {name: len(x) for name, (x, _) in federation.datasets.items()}
    gradients, solutions = {}, {}
    for name, rows in owned.items():
        x, y = federation.datasets[name]
        gradients[name] = torch.func.grad(federation.value)(theta, x[rows], y[rows])
        hessian = torch.kron(torch.eye(3).double(), x.T @ x / len(x)) + (federation.loss.l2 + 0.01) * torch.eye(18)
        solutions[name] = torch.linalg.solve(hessian, gradients[name])
    expected = theta.clone()
    for name, raw in solutions.items():
        alpha = gradients[name].norm() / sum(g.norm() for g in gradients.values())
        scale = min(1.0, float(0.01 * theta.norm() / raw.norm()))
        expected -= counts[name] / sum(counts.values()) * alpha * scale * raw
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weights", ["gradient-norm", "none"])
def test_a_printed_step_that_is_no_number_is_not_taken(weights):
    federation, state = trained_ridge()
    options = dataclasses.replace(PAPER, influence_decay=False, damping=1e-320, beta=None, causal_weights=weights)
    with pytest.raises(NumericalError, match="NaN or infinite"):
        forgotten(federation.engine(), state, Request.of("client-1"), options)


def test_causal_weights_of_both_kinds():
    federation, _ = trained_ridge()
    counts = {name: len(x) for name, (x, _) in federation.datasets.items()}
    parties = Request.of(samples={"client-1": [0, 1, 2], "client-2": [5]}).parties(counts)
    assert causal_weights("share", parties, {}) == dict.fromkeys(counts, 0.0) | {"client-1": 0.75, "client-2": 0.25}
    by_norm = causal_weights("gradient-norm", parties, {"client-1": 1.0, "client-2": 3.0})
    assert by_norm == dict.fromkeys(counts, 0.0) | {"client-1": 0.25, "client-2": 0.75}
    assert set(causal_weights("uniform", parties, {}).values()) == {0.2}


def test_shares_make_the_mean_gradient_over_the_forgotten_data():
    """Data to forget that is spread unequally: only the shares give retraining, gradient norms do not."""
    federation, state = trained_ridge(4)
    samples = {"client-4": list(range(20)), "client-0": [0]}
    truth = ridge_closed_form(federation, dict(samples))
    errors = {}
    for kind in ("share", "gradient-norm", "uniform"):
        options = dataclasses.replace(CORRECTED, **WHOLE, damping=0.0, tau=None, causal_weights=kind)
        outcome = forgotten(federation.engine(), state, Request.of(samples=samples), options)
        errors[kind] = float((outcome.state.model.parameters - truth).norm() / truth.norm())
    assert errors["share"] < 1e-6
    assert min(errors["gradient-norm"], errors["uniform"]) > 1e-3


def test_the_curvature_must_be_that_of_the_clients_that_stay():
    federation, state = trained_ridge()
    truth = ridge_closed_form(federation, {"client-4": None})
    errors = {}
    for whose in ("retained", "everyone"):
        options = dataclasses.replace(CORRECTED, **WHOLE, damping=0.0, tau=None, curvature_of=whose)
        outcome = forgotten(federation.engine(), state, Request.of("client-4"), options)
        errors[whose] = float((outcome.state.model.parameters - truth).norm())
    assert errors["retained"] < 1e-6 < errors["everyone"]


@pytest.mark.parametrize("name", list(ABLATION))
def test_every_row_of_the_component_ablation_gives_another_model(name):
    federation, state = trained_ridge()
    request = Request.of(samples={"client-4": list(range(20)), "client-0": [0]})
    every = {"curvature_samples": None} if name == "hf-kcu" else {}
    found = {
        label: method(name).configured({**changes, **every})(federation.engine(), state, request).state.model.parameters
        for label, changes in ABLATION[name].items()
    }
    same = {label for label in found if torch.allclose(found[label], found["full"], rtol=1e-6, atol=0)} - {"full"}
    # The corrected step on ridge is safe at its full length.
    assert same == ({"without adaptive scaling"} if name == "hf-kcu" else set())


def test_without_causal_weighting_as_printed_is_one_step_with_everyones_hessian():
    federation, state = trained_ridge()
    options = dataclasses.replace(PAPER, causal_weights="none", iterations=100)
    owned = {"client-1": [0, 1], "client-3": [4]}
    found = forgotten(federation.engine(), state, Request.of(samples=owned), options).state.model.parameters
    theta = state.model.parameters
    rows = [(federation.datasets[name][0][i], federation.datasets[name][1][i]) for name, i in owned.items()]
    gradient = torch.func.grad(federation.value)(theta, *(torch.cat(part) for part in zip(*rows, strict=True)))
    inputs, _ = federation.pooled()
    hessian = torch.kron(torch.eye(3).double(), inputs.T @ inputs / len(inputs))
    raw = torch.linalg.solve(hessian + (federation.loss.l2 + 0.01) * torch.eye(18), gradient)
    expected = theta - min(1.0, float(0.01 * theta.norm() / raw.norm())) * raw
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_damping_defaults_to_learning_rate_and_steps():
    federation, state = trained_ridge()
    outcome = forgotten(federation.engine(), state, Request.of("client-0"), CORRECTED)
    assert outcome.details["damping"] == pytest.approx(1 / (0.1 * 5 * 20))
    bare = dataclasses.replace(state, schedule=None)
    with pytest.raises(RequestError, match="Give a damping"):
        forgotten(federation.engine(), bare, Request.of("client-0"), CORRECTED)


def test_a_preconditioner_changes_the_iterations_not_the_answer():
    federation = digits_softmax(0.001)
    state = federation.state(federation.optimum())
    plain = dataclasses.replace(CORRECTED, **WHOLE | {"iterations": 300}, damping=1e-4, tau=None)
    sketched = dataclasses.replace(plain, preconditioner_rank=60)
    one = forgotten(federation.engine(), state, Request.of("client-0"), plain)
    two = forgotten(federation.engine(), state, Request.of("client-0"), sketched)
    torch.testing.assert_close(one.state.model.parameters, two.state.model.parameters, rtol=1e-6, atol=1e-8)
    solves = [outcome.details["steps"][0]["solves"]["server"]["iterations"] for outcome in (one, two)]
    assert solves[1] < 0.7 * solves[0]


def test_what_a_method_cannot_do_is_refused_with_the_one_that_can():
    federation, state = trained_ridge()
    memory = Memory()
    memory.record(
        {name: torch.ones(18).double() for name in federation.datasets}, dict.fromkeys(federation.datasets, 1)
    )
    kept = dataclasses.replace(state, memory=memory)
    with pytest.raises(RequestError, match="no checkpoints to replay from: use hf-kcu"):
        forgotten(federation.engine(), kept, Request.of(samples={"client-0": [1]}), KRYLOV)
    with pytest.raises(RequestError, match="No vectors were kept"):
        forgotten(federation.engine(), state, Request.of("client-0"), KRYLOV)
    gone = federation.engine().without(("client-0",))
    with pytest.raises(RequestError, match="needs its data once: use retrace"):
        forgotten(gone, kept, Request.of("client-0"), CORRECTED)


def norm_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("options", [KRYLOV, CORRECTED, recovering(KRYLOV)], ids=label)
def test_batch_norm_statistics_forget_too(options):
    """The leaver's inputs are shifted far away; afterwards the statistics are those of the clients that stay."""
    generator = torch.Generator().manual_seed(1)
    model = norm_net()
    datasets = {}
    for number, shift in enumerate((50.0, 0.0, 0.0)):
        inputs = torch.randn(64, 4, generator=generator) + shift
        datasets[f"client-{number}"] = (inputs, (inputs.sum(dim=1) > 4 * shift).long())
    engine = LocalEngine(model, CrossEntropy(), datasets)
    state = train(engine, Snapshot.of(model), TrainingPlan(rounds=3, epochs=2, batch_size=16, learning_rate=0.01))
    outcome = forgotten(
        engine, state, Request.of("client-0"), dataclasses.replace(options, curvature_samples=64, tau=10.0)
    )
    assert outcome.succeeded
    with torch.no_grad():
        retained = torch.cat([datasets[f"client-{number}"][0] for number in (1, 2)])
        first = nn.Linear(4, 8)
        copied = norm_net()
        outcome.state.model.write_to(copied)
        first.load_state_dict(copied[0].state_dict())
        mean = first(retained).mean(dim=0)
    assert (state.model.buffers["1.running_mean"] - mean).abs().max() > 3
    assert (outcome.state.model.buffers["1.running_mean"] - mean).abs().max() < 0.5


def test_a_short_step_is_reported_and_recovery_is_recorded_in_the_memory():
    federation = digits_softmax(0.01)
    datasets = {name: (x.float(), y) for name, (x, y) in federation.datasets.items()}
    model = nn.Linear(17, 10, bias=False)
    engine = LocalEngine(model, CrossEntropy(), datasets)
    state = train(engine, Snapshot.of(model), TrainingPlan(rounds=5, epochs=1, batch_size=32, learning_rate=0.1))
    far = Memory()
    far.record(
        {"client-0": torch.randn(170, generator=torch.Generator().manual_seed(0)), "client-1": torch.zeros(170)},
        {"client-0": 1, "client-1": 1},
    )
    hurried = dataclasses.replace(KRYLOV, filter="none", curvature_samples=None)
    cut = forgotten(engine, dataclasses.replace(state, memory=far), Request.of("client-0"), hurried)
    assert cut.details["steps"][0]["length"] < 0.25
    assert "was safe for the retained clients" in cut.warnings[0]
    options = recovering(dataclasses.replace(KRYLOV, curvature_samples=200), Recovery(learning_rate=0.05))
    outcome = forgotten(engine, state, Request.of("client-0"), options)
    recovery = outcome.details["recovery"]
    assert recovery["retained_loss_after"] <= recovery["retained_loss_before"]
    assert outcome.memory.rounds == state.memory.rounds + (recovery["length"] > 0)
    assert outcome.cost.rounds <= options.expected_rounds


def test_a_model_with_a_nan_is_refused_before_any_work():
    federation, state = trained_ridge()
    broken = ServerState(Snapshot(state.model.parameters * math.nan, {}), state.schedule)
    engine = watched(federation)
    with pytest.raises(ModelError, match="NaN or infinite"):
        forgotten(engine, broken, Request.of("client-0"), CORRECTED)
    assert not hasattr(engine, "log")


def test_the_trust_region_looks_at_other_samples_than_the_curvature():
    federation, state = trained_ridge()
    engine = watched(federation)
    forgotten(engine, state, Request.of("client-0"), dataclasses.replace(CORRECTED, curvature_samples=20))
    drawn = {True: {}, False: {}}
    for round_ in engine.log:
        for name, task in round_.items():
            if isinstance(task, Losses | CurvatureProduct):
                drawn[isinstance(task, Losses)][name] = task.draw
    assert drawn[True].keys() == drawn[False].keys() == set(federation.datasets) - {"client-0"}
    for name, front in drawn[False].items():
        back = drawn[True][name]
        assert (front.seed, front.size) == (back.seed, back.size)
        assert (front.from_back, back.from_back) == (False, True)


def test_a_step_is_judged_with_the_statistics_that_belong_to_it():
    """A tenth of the weights before a batch norm is the same function once its statistics are new, and not before."""
    model = norm_net()
    inputs = torch.randn(90, 4, generator=torch.Generator().manual_seed(3))
    datasets = {
        f"client-{number}": (part, (part.sum(dim=1) > 0).long()) for number, part in enumerate(inputs.split(30))
    }
    engine = LocalEngine(model, CrossEntropy(), datasets)
    state = train(engine, Snapshot.of(model), TrainingPlan(rounds=3, epochs=2, batch_size=10, learning_rate=0.1))
    parties = prepared(engine, state, Request.of("client-0"))
    stay = Retained.of(engine, state, parties)
    start = stay.statistics(state.model)
    layers = start.layers()
    parts = layers.unflatten(start.parameters)
    step = layers.flatten({n: 0.9 * p if n.startswith("0.") else torch.zeros_like(p) for n, p in parts.items()})
    trial, losses = longest_safe(stay.trials(start, step, LENGTHS), 0.01)
    assert trial.length == 1.0
    assert losses["retained_rise"] == pytest.approx(0.0, abs=0.01)
    torch.testing.assert_close(trial.model.parameters, start.parameters - step)
    torch.testing.assert_close(trial.model.buffers["1.running_mean"], 0.1 * start.buffers["1.running_mean"])
    assert stay.losses(start, step, (0.0, 1.0)).rises[1] > 0.01  # with the statistics as they were


def test_statistics_are_estimated_on_as_many_samples_as_the_curvature_but_on_whole_batches():
    chance = torch.Generator().manual_seed(4)
    sizes = {"client-0": 40, "client-1": 400, "client-2": 40}
    inputs = {name: torch.randn(size, 4, generator=chance) for name, size in sizes.items()}
    engine = WatchedEngine(norm_net(), CrossEntropy(), {n: (x, (x.sum(dim=1) > 0).long()) for n, x in inputs.items()})
    state = train(engine, Snapshot.of(norm_net()), TrainingPlan(rounds=2, epochs=1, batch_size=16, learning_rate=0.05))
    engine.log.clear()
    outcome = forgotten(engine, state, Request.of("client-0"), dataclasses.replace(RETRACE, curvature_samples=110))
    assert outcome.succeeded
    assert "correction" in outcome.details
    asked = [{name: task.draw.size for name, task in tasks.items()} for tasks in engine.log if statistics_in(tasks)]
    assert asked[0] == {"client-1": 112, "client-2": 16}  # by size 100 and 10, filled up to whole batches


def four_clients():
    chance = torch.Generator().manual_seed(6)
    model, marks = norm_net(), torch.randn(2, 4, generator=chance)
    datasets = {}
    for number in range(4):
        labels = torch.randint(2, (48,), generator=chance)
        datasets[f"client-{number}"] = (marks[labels] + torch.randn(48, 4, generator=chance), labels)
    engine = WatchedEngine(model, CrossEntropy(), datasets)
    state = train(engine, Snapshot.of(model), TrainingPlan(rounds=5, epochs=2, batch_size=16, learning_rate=0.1))
    engine.log.clear()
    return engine, state, prepared(engine, state, Request.of("client-0"))


def test_with_batch_norm_every_length_is_tried_and_the_longest_safe_one_taken():
    engine, state, parties = four_clients()
    stay = Retained.of(engine, state, parties)
    step = 30 * state.memory.influence(("client-0",))

    def search(allowed, lengths=LENGTHS):
        return longest_safe(stay.trials(state.model, step, lengths), allowed)

    rises = [search(math.inf, (length,))[1]["retained_rise"] for length in LENGTHS]
    for rise in rises:
        longest = next(length for length, own in zip(LENGTHS, rises, strict=True) if own <= rise)
        trial, losses = search(rise)
        assert (trial.length, losses["retained_rise"]) == (longest, pytest.approx(rises[LENGTHS.index(longest)]))
        torch.testing.assert_close(trial.model.parameters, state.model.parameters - trial.length * step)
        expected = stay.statistics(trial.model)
        assert all(torch.equal(trial.model.buffers[name], expected.buffers[name]) for name in expected.buffers)
    assert search(min(rises) - 1e-6)[0] is None
    engine.log.clear()
    search(min(rises) - 1e-6)  # the model as it is was asked for once, and two messages for every length
    assert len(engine.log) == 1 + 2 * len(LENGTHS)


@pytest.mark.parametrize("options", [PAPER, dataclasses.replace(CORRECTED, tau=None, seed=1)], ids=label)
def test_without_a_belt_statistics_are_new_too(options):
    engine, state, parties = four_clients()
    outcome = forgotten(engine, state, Request.of("client-0"), options)
    stay = Retained.of(engine, state, parties, outcome.details.get("curvature_samples"), seed=1)
    anew = stay.statistics(outcome.state.model)
    for name, buffer in anew.buffers.items():
        torch.testing.assert_close(outcome.state.model.buffers[name], buffer)
    record = outcome.details["steps"][0]
    moved = float((outcome.state.model.parameters - state.model.parameters).norm())
    assert moved == pytest.approx(record["length"] * record["norm"], rel=1e-3)


def test_forgotten_samples_do_not_enter_the_statistics():
    engine, state, _ = four_clients()
    forgotten(
        engine, state, Request.of(samples={"client-2": [0, 3]}), dataclasses.replace(CORRECTED, curvature_samples=40)
    )
    asked = [tasks["client-2"] for tasks in engine.log if statistics_in(tasks)]
    assert {(task.exclude, task.draw.from_back) for task in asked} == {((0, 3), False)}


def statistics_in(tasks):
    return any(isinstance(task, NormStatistics) for task in tasks.values())


@pytest.mark.parametrize("options", [KRYLOV, RETRACE, recovering(RETRACE)], ids=label)
def test_new_batch_norm_statistics_do_not_slip_past_the_safety_belt(options):
    """Whatever the statistics do to it, a request that succeeds keeps the retained loss within tau at the end."""
    generator = torch.Generator().manual_seed(5)
    succeeded = 0
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        datasets = {}
        for number, shift in enumerate((3.0, 0.0, 0.5)):
            inputs = torch.randn(24, 4, generator=generator) + shift
            datasets[f"client-{number}"] = (inputs, (inputs.sum(dim=1) > 4 * shift).long())
        engine = LocalEngine(model, CrossEntropy(), datasets)
        plan = TrainingPlan(rounds=4, epochs=3, batch_size=8, learning_rate=0.1, seed=seed)
        state = train(engine, Snapshot.of(model), plan)
        outcome = forgotten(
            engine, state, Request.of("client-0"), dataclasses.replace(options, curvature_samples=None, tau=0.02)
        )
        inputs = torch.cat([datasets[f"client-{number}"][0] for number in (1, 2)])
        labels = torch.cat([datasets[f"client-{number}"][1] for number in (1, 2)])
        losses = [mean_loss(predict(model, s.model, inputs), labels) for s in (state, outcome.state)]
        assert losses[1] <= losses[0] + 0.02 + 1e-5
        succeeded += outcome.succeeded
    assert succeeded > 0


def test_a_recovery_round_taken_in_part_is_recorded_in_part():
    federation = digits_softmax(0.01)
    datasets = {name: (x.float(), y) for name, (x, y) in federation.datasets.items()}
    model = nn.Linear(17, 10, bias=False)
    engine = LocalEngine(model, CrossEntropy(), datasets)
    state = train(engine, Snapshot.of(model), TrainingPlan(rounds=5, epochs=1, batch_size=32, learning_rate=0.5))
    lengths = set()
    for rate in (2.0, 8.0, 16.0, 32.0):
        options = recovering(dataclasses.replace(KRYLOV, curvature_samples=None), Recovery(learning_rate=rate))
        outcome = forgotten(engine, state, Request.of("client-0"), options)
        plain = forgotten(engine, state, Request.of("client-0"), dataclasses.replace(options, recovery=None))
        length = outcome.details["recovery"]["length"]
        lengths.add(length)
        # What the vectors of those who stay gained adds up to nothing, and scales with the length that was taken.
        moved = outcome.state.model.parameters - plain.state.model.parameters
        gained = {name: outcome.memory.norms([name])[0] for name in outcome.memory.clients}
        if length == 0:
            assert gained == {name: plain.memory.norms([name])[0] for name in plain.memory.clients}
        stay = Retained(engine, dict.fromkeys(outcome.memory.clients, ()), engine.clients())
        replies = stay.train(plain.state.model, TrainingPlan(1, 1, 32, rate))
        updates = without_return(replies, state.model, plain.state.model)
        expected = plain.memory.copy()
        expected.record({n: length * r.update for n, r in updates.items()}, {n: r.count for n, r in updates.items()})
        torch.testing.assert_close(
            torch.tensor(outcome.memory.norms(gained)), torch.tensor(expected.norms(gained)), rtol=1e-4, atol=1e-6
        )
        assert (length == 0) == (float(moved.norm()) == 0)
    assert lengths & {0.25, 0.5, 0.75}
