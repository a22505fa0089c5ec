"""The short round after a long step: who trains on what, when it is chosen, and that it is taken as it is recorded."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn

from expunge.core.losses import CrossEntropy, SquaredError
from expunge.core.vectors import Snapshot
from expunge.federation.engines.local import LocalEngine
from expunge.federation.keeping.state import ServerState
from expunge.federation.messages.tasks import Draw, Losses, Train
from expunge.federation.training.fedavg import train
from expunge.federation.training.plan import Schedule, TrainingPlan
from expunge.federation.training.recipe import SGD, AdamW, FedAvgM, Recipe
from expunge.federation.training.response import Response
from expunge.federation.training.works import Round, Work
from expunge.unlearning import repair
from expunge.unlearning.lengths import combined
from expunge.unlearning.recovery import strip_return
from expunge.unlearning.repair import SCALES, Calibration, Correction, Moved, ShortRound, repaired
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained
from federation.masking import MaskedEngine
from federation.small import CLASSES, FEATURES, clients, linear, mlp, norm_net, seeded
from unlearning.presets import RETRACE, forgotten
from unlearning.test_correction import WatchedEngine
from unlearning.test_recovery import Line

DATA = {  # labels that can be learnt, and four rounds are too few for that: a round more helps
    name: (inputs, inputs[:, :3].argmax(dim=1)) for name, (inputs, _) in clients(ada=60, bob=72, cyd=48, dan=41).items()
}
PLAN = TrainingPlan(rounds=4, epochs=2, batch_size=12, learning_rate=0.1)
OPTIONS = dataclasses.replace(
    RETRACE, curvature_samples=20, tau=10.0, seed=5, long_step_ratio=0.0, coupled=False
)  # every step is long, and taken by factors
LEAVER = Request.of("ada")
CLASSIFIER = 15
"""Parameters of the last layer."""


def trained(build=mlp, rounds=PLAN.rounds, data=DATA):
    engine = WatchedEngine(build(), CrossEntropy(), data)
    state = train(engine, Snapshot.of(build()), dataclasses.replace(PLAN, rounds=rounds))
    engine.log.clear()
    return engine, state


def uncorrected(options):
    return dataclasses.replace(options, correction=False, long_step_ratio=0.1, round_lengths=RETRACE.round_lengths)


def response(state):
    """Of those who stay, as the memory has recorded it."""
    return state.memory.response(LEAVER.clients, state.schedule, state.model.layout)


def short_round(state):
    return ShortRound.of(state, response(state), RETRACE.round_lengths)


def asked(engine, remembers, forgot, parties, short, seed=0):
    stay = Retained(engine, parties.retained, parties.counts, seed=seed)
    return short.updates(stay, Moved(remembers, forgot, None), short.draws(stay))


def test_part_of_the_samples_in_small_batches_and_the_length_on_others():
    engine, state = trained()
    outcome = forgotten(engine, state, LEAVER, OPTIONS)
    training, losses, gradient, corrected, before, scales = engine.log[-6:]
    assert set(training) == set(losses) == {"bob", "cyd", "dan"}
    for name, task in training.items():
        count = len(DATA[name][1])
        assert isinstance(task, Train)
        assert (task.epochs, task.batch_size, task.learning_rate) == (1, 3, pytest.approx(0.1))
        assert task.optimiser == PLAN.recipe.client
        assert task.draw == Draw(math.ceil(count / 3), seed=5)
        assert task.averaged
        assert isinstance(losses[name], Losses)
        assert (losses[name].draw.seed, losses[name].draw.from_back) == (5, True)
        assert task.draw.size + losses[name].draw.size <= count
    assert len({task.seed for task in training.values()}) == 3
    plain = forgotten(engine, state, LEAVER, uncorrected(OPTIONS))
    trained_on = sum(task.draw.size for task in training.values())
    looked_at = 5 * sum(task.draw.size for task in losses.values()) / 3
    assert {name: task.draw for name, task in before.items()} == {name: task.draw for name, task in scales.items()}
    scaled = (len(SCALES) + 4) * sum(task.draw.size for task in scales.values()) / 3
    lengths = len(OPTIONS.correction_lengths)
    tried = sum(task.draw.size + lengths * corrected[name].draw.size / 3 for name, task in gradient.items())
    more = outcome.cost.sample_gradients - plain.cost.sample_gradients
    assert more == pytest.approx(trained_on + looked_at + tried + scaled)
    assert outcome.cost.rounds == plain.cost.rounds + 6 <= OPTIONS.expected_rounds


def test_it_is_taken_as_far_as_it_helps_and_recorded_as_it_was_taken():
    engine, state = trained()
    options = dataclasses.replace(OPTIONS, curvature_samples=None, seed=1, round_lengths=(0.0, 0.5))
    outcome = forgotten(engine, state, LEAVER, options)
    before = forgotten(engine, state, LEAVER, uncorrected(options))
    record = outcome.details["short_round"]
    assert outcome.details["correction"]["length"] == 0.0  # there is much room below tau
    assert record["length"] == 0.5
    assert record["retained_loss_after"] < record["retained_loss_before"]
    parties = LEAVER.parties(engine.clients())
    updates = asked(engine, state.model, before.state.model, parties, short_round(state), seed=1)
    mean = sum(reply.count * reply.update for reply in updates.values()) / sum(r.count for r in updates.values())
    walked = outcome.state.model.parameters - before.state.model.parameters
    torch.testing.assert_close(walked, record["length"] * mean)
    assert outcome.details["calibration"]["length"] == 0.0  # the training was a short one: it rested as far from it
    expected = before.memory.copy()
    taken = {name: record["length"] * reply.update for name, reply in updates.items()}
    expected.record(taken, {name: reply.count for name, reply in updates.items()})
    torch.testing.assert_close(outcome.memory.influence(["bob"]), expected.influence(["bob"]))


def test_nobody_walks_back_to_the_model_that_remembers():
    """As the round of recovery by hand: ada's update has its component towards (1, 0) taken out, bob's goes away."""
    data = {
        "ada": (torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[2.0]]).double()),
        "bob": (torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[-3.0]]).double()),
        "zoe": (torch.tensor([[9.0, 9.0]]).double(), torch.tensor([[9.0]]).double()),
    }
    forgot, remembers = Snapshot.of(Line(0.0, 0.0)), Snapshot.of(Line(1.0, 0.0))
    engine = LocalEngine(Line(0.0, 0.0), SquaredError(), data)
    short = ShortRound(TrainingPlan(rounds=1, epochs=1, batch_size=1, learning_rate=0.1))
    parties = Request.of("zoe").parties(engine.clients())
    updates = asked(engine, remembers, forgot, parties, short)
    torch.testing.assert_close(updates["ada"].update, torch.tensor([0.0, 0.2]).double())
    torch.testing.assert_close(updates["bob"].update, torch.tensor([-0.3, 0.0]).double())


def test_the_leavers_samples_are_not_trained_on():
    engine, state = trained()
    parties = Request.of(samples={"bob": range(40)}).parties(engine.clients())
    asked(engine, state.model, state.model, parties, short_round(state))
    (tasks,) = engine.log
    assert tasks["bob"].exclude == tuple(range(40))
    assert tasks["bob"].draw.size == 11  # of 32
    assert tasks["cyd"].draw.size == 16  # of 48


@pytest.mark.parametrize(
    ("steps", "spent", "share"),
    [(40_000, 0, 2 / 3), (20_000, 12_000, 0.1023), (20_000, 40_000, 0.08), (900, 0, 0.08)],
)
def test_it_takes_what_a_request_may_still_spend(steps, spent, share):
    """A 52nd of the samples that were trained on, without what was spent and five looks at 1500; but a little."""
    own = Response(Recipe(), (Round((Work(1.0, 0.1, steps),)),))
    model = Snapshot.of(mlp())
    state = dataclasses.replace(ServerState(model), schedule=Schedule(0.1, 10, 10, batch_size=64))
    short = ShortRound.of(state, own, RETRACE.round_lengths, spent)
    engine, counts = LocalEngine(mlp(), CrossEntropy(), DATA), {"bob": 40_000, "cyd": 10_000}
    stay = Retained(engine, dict.fromkeys(counts, ()), counts, samples=1500)
    sizes = {name: draw.size for name, draw in short.draws(stay).items()}
    assert sizes == pytest.approx({name: share * count for name, count in counts.items()}, rel=0.01)


def test_a_request_takes_no_more_than_it_may(monkeypatch):
    """Whatever came before the short round and comes after it is counted."""
    monkeypatch.setattr(repair, "LEAST", 0)
    spent, trained_on = [], None
    for allowed in (0.0, 20.0, 30.0):
        engine, state = trained()
        trained_on = response(state).steps * PLAN.batch_size
        monkeypatch.setattr(repair, "WORK", trained_on / (spent[0] - allowed) if spent else 1e-6)
        engine.cost.sample_gradients += 1000  # of an earlier request
        outcome = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, curvature_samples=60))
        assert "short_round" in outcome.details
        spent.append(outcome.cost.sample_gradients)
    assert spent[1] == pytest.approx(spent[0] - 20, abs=8)
    assert spent[2] == pytest.approx(spent[0] - 30, abs=8)


@pytest.mark.parametrize(
    ("share", "found"), [(0.999, ["short_round", "correction", "calibration"]), (1.001, ["correction"])]
)
def test_only_after_a_long_step(share, found):
    engine, state = trained()
    norm = forgotten(engine, state, LEAVER, OPTIONS).details["steps"][0]["norm"]
    ratio = share * norm / float(state.model.parameters.norm())
    details = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, long_step_ratio=ratio)).details
    assert [name for name in details if name in ("short_round", "correction", "calibration")] == found


def test_where_only_sums_are_seen_the_correction_stays():
    _, state = trained()
    masked = MaskedEngine(LocalEngine(mlp(), CrossEntropy(), DATA), ("ada",))
    details = forgotten(masked, state, LEAVER, OPTIONS).details
    assert "correction" in details
    assert "short_round" not in details


@pytest.mark.parametrize("changes", [{"correction": False}, {"tau": None}])
def test_where_nothing_is_repaired_there_is_none(changes):
    engine, state = trained(mlp)
    details = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, long_step_ratio=0.1, **changes)).details
    assert not {"short_round", "correction"} & set(details)


def test_with_batch_norm_the_correction_stays():
    engine, state = trained(norm_net)
    details = forgotten(engine, state, LEAVER, OPTIONS).details
    assert "correction" in details
    assert "short_round" not in details


def test_strip_return_is_what_is_used():
    engine, state = trained()
    remembers = state.model.moved(state.model.parameters + 1.0)
    parties = LEAVER.parties(engine.clients())
    free = asked(engine, state.model, state.model, parties, short_round(state))
    bound = asked(engine, remembers, state.model, parties, short_round(state))
    towards = torch.ones_like(state.model.parameters)
    for name in free:
        torch.testing.assert_close(bound[name].update, strip_return(free[name].update, towards))


@pytest.mark.parametrize("samples", [None, "auto", 150])
def test_its_length_is_judged_on_others_where_everything_may_be_looked_at(samples):
    engine, state = trained()
    forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, curvature_samples=samples, seed=1))
    training, losses = next(
        pair for pair in itertools.pairwise(engine.log) if all(isinstance(task, Train) for task in pair[0].values())
    )
    for name, task in training.items():
        assert task.draw.size + losses[name].draw.size <= len(DATA[name][1]) + 1  # sizes are rounded up
        assert losses[name].draw.from_back
        assert losses[name].draw.size >= 0.6 * len(DATA[name][1])


def test_where_it_does_not_help_the_correction_is_what_it_is_alone():
    engine, state = trained()
    both = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, round_lengths=(0.0,)))
    assert both.details["short_round"]["length"] == 0.0
    assert both.cost.rounds <= OPTIONS.expected_rounds
    alone = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, long_step_ratio=math.inf))
    assert both.details["correction"] == alone.details["correction"]
    assert both.cost.rounds == alone.cost.rounds + 4  # a round in vain, and scales of two models
    assert torch.equal(both.state.model.parameters[:-CLASSIFIER], alone.state.model.parameters[:-CLASSIFIER])
    assert both.memory.rounds == alone.memory.rounds


def test_clients_that_small_batches_throw_off_send_nothing():
    engine, state = trained(rounds=20)
    short = short_round(state)
    wild = dataclasses.replace(short, plan=dataclasses.replace(short.plan, learning_rate=1e308))
    updates = asked(engine, state.model, state.model, LEAVER.parties(engine.clients()), wild)
    assert {float(reply.update.norm()) for reply in updates.values()} == {0.0}


def test_what_it_wins_counts_against_what_the_step_has_cost():
    engine, state = trained()
    parties = LEAVER.parties(engine.clients())
    stay = Retained(engine, parties.retained, parties.counts, samples=200, seed=1)
    moved = Moved(state.model, state.model.moved(1.1 * state.model.parameters), None, risen=0.3)
    correction = Correction(stay.factors(state.model), response(state), tau=0.0)
    after, records = repaired(stay, moved, {"short_round": short_round(state), "correction": correction})
    assert list(records) == ["short_round", "correction"]
    assert all(record["retained_rise"] < 0 for record in records.values())
    assert after.risen == pytest.approx(0.3 + sum(record["retained_rise"] for record in records.values()))
    first = short_round(state)(stay, moved)
    second = correction(stay, dataclasses.replace(moved, model=first.model, risen=0.3 + first.record["retained_rise"]))
    assert torch.equal(after.model.parameters, second.model.parameters)  # from where the round has led


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_outputs_are_scaled_until_the_model_is_as_sure_as_before_or_a_part_of_that_way(part):
    """One made less sure of the labels; one made more sure is left alone, and nobody who stays loses by it."""
    noisy, names = clients(ada=60, bob=72, cyd=48, dan=41), ("bob", "cyd")  # labels that nobody can be sure of
    engine, state = trained(rounds=100, data=noisy)
    stay, net, taken = Retained(engine, dict.fromkeys(names, ()), engine.clients()), mlp(), set()
    labels, inputs = (torch.cat([noisy[name][part] for name in names]) for part in (1, 0))
    last = torch.zeros_like(state.model.parameters)
    last[-CLASSIFIER:] = state.model.parameters[-CLASSIFIER:]

    def scaled(factor):
        return state.model.moved(state.model.parameters + (factor - 1) * last)

    def loss(model):
        model.write_to(net)
        return float(torch.nn.functional.cross_entropy(net(inputs).detach(), labels))

    curvature, ended = stay.factors(state.model), set()
    for before, after in itertools.product((0.8, 1.0, 1.2), (0.3, 0.5, 0.7, 0.85, 1.0, 1.3)):
        model = scaled(after)
        found = Calibration(curvature, part)(stay, Moved(scaled(before), model, None, risen=0.1))
        scale = 1 + found.record["length"]
        assert any(scale == pytest.approx(tried) for tried in SCALES)
        lowest = min(SCALES, key=lambda tried: loss(scaled(after * tried)))
        wished = min(max((before / after) ** part, 1.0), lowest)
        assert scale == pytest.approx(wished, abs=0.051), (before, after)
        ended.add("lowest" if lowest < (before / after) ** part else "as sure")
        assert found.record["retained_loss_after"] == pytest.approx(loss(found.model))
        assert found.record["retained_rise"] == pytest.approx(loss(found.model) - loss(model), abs=1e-5)
        torch.testing.assert_close(found.model.parameters, scaled(after * scale).parameters)
        taken.add(round(scale, 1))
    assert len(taken) >= 4
    assert ended == {"lowest", "as sure"}
    for risen in (0.0, 0.2):  # what the step has cost them does not count: it is only ever lowered
        surer = Moved(scaled(3.0), scaled(1.3), None, risen=risen)
        assert Calibration(curvature, part)(stay, surer).record["length"] == 0
        unsure = Moved(scaled(1.0), scaled(0.4), None, risen=risen)
        assert Calibration(curvature, part)(stay, unsure).record["length"] == pytest.approx(0.5)


class Boasting(WatchedEngine):
    """One client lies about how sure a model is: the one before the step looks sure, the one after unsure."""

    def ask(self, tasks):
        replies = super().ask(tasks)
        lie = replies["bob"]
        number = len(lie.total)
        told = lie.total.clone()
        told[0 if number == 2 else -1] += 100.0 if number == 2 else -100.0
        return {**replies, "bob": dataclasses.replace(lie, total=told)}


def test_one_who_lies_does_not_scale_the_outputs():
    engine, state = trained(rounds=20)
    clients_ = dict.fromkeys(("bob", "cyd", "dan"), ())
    lying = Boasting(mlp(), CrossEntropy(), DATA)
    for who in (engine, lying):
        stay = Retained(who, clients_, engine.clients())
        curvature = Retained(engine, clients_, engine.clients()).factors(state.model)
        found = Calibration(curvature)(stay, Moved(state.model, state.model, None))
        assert found.record["length"] <= 0.1


def test_how_sure_a_model_is_comes_from_two_slight_scales():
    engine, state = trained(rounds=20)
    names = ("bob", "cyd", "dan")
    stay, net = Retained(engine, dict.fromkeys(names, ()), engine.clients()), mlp()
    labels, inputs = (torch.cat([DATA[name][part] for name in names]) for part in (1, 0))
    state.model.write_to(net)
    outputs = net(inputs).detach()
    own = outputs.gather(1, labels[:, None])[:, 0]
    replies = Calibration(stay.factors(state.model))._told(stay, state.model, (repair.SLIGHT, -repair.SLIGHT))
    one, other = combined(replies).means
    told = (other - one) / (2 * repair.SLIGHT)
    assert told == pytest.approx(float((own - outputs.mean(dim=1)).mean()), rel=0.01)


def test_one_layer_is_not_scaled():
    """There the response is right, and the scale is the client's, too."""
    engine = LocalEngine(linear(), CrossEntropy(), DATA)
    state = train(engine, Snapshot.of(linear()), PLAN)
    assert "calibration" not in forgotten(engine, state, LEAVER, OPTIONS).details


def test_other_rounds_are_not_averaged():
    engine, state = trained()
    Retained(engine, {"bob": (), "cyd": ()}, engine.clients()).train(state.model, PLAN)
    assert [task.averaged for tasks in engine.log for task in tasks.values()] == [False, False]
    assert not PLAN.task(state.model, 0, "bob").averaged


def test_it_trains_as_the_training_did():
    """With Adam after Adam, at the mean rate of those who stay by what they did; an unknown optimiser trains nobody."""
    engine = WatchedEngine(mlp(), CrossEntropy(), DATA)
    recipe = Recipe(AdamW(weight_decay=0.02), FedAvgM(0.5, 0.5))
    state = train(engine, Snapshot.of(mlp()), dataclasses.replace(PLAN, recipe=recipe, learning_rate=0.02, cosine=True))
    short = short_round(state)
    assert (short.plan.recipe, short.plan.batch_size) == (Recipe(recipe.client), 3)
    assert short.plan.learning_rate == pytest.approx(0.02 * sum(1 + math.cos(math.pi * n / 4) for n in range(4)) / 8)
    engine.log.clear()
    asked(engine, state.model, state.model, LEAVER.parties(engine.clients()), short)
    assert {task.optimiser for task in engine.log[0].values()} == {recipe.client}
    own = dataclasses.replace(response(state), recipe=Recipe(OwnRule()))
    assert ShortRound.of(state, own, RETRACE.round_lengths) is None


class OwnRule:
    """An optimiser of one's own."""

    name, adaptive = "mine", False

    def left(self, curvature, rate, steps, moment=0.0):
        return (1 - rate * curvature) ** steps


def test_outputs_that_are_no_log_odds_are_not_scaled():
    data = {name: (inputs, inputs[:, :1].tanh()) for name, (inputs, _) in DATA.items()}
    net = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    engine = LocalEngine(net, SquaredError(), data)
    details = forgotten(engine, train(engine, Snapshot.of(net), PLAN), LEAVER, OPTIONS).details
    assert "short_round" in details
    assert "calibration" not in details


@pytest.mark.parametrize("coupled", [False, True, "auto"])
def test_layers_over_tokens_are_warned_of_unless_they_are_looked_at_together(coupled):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(1, 4), nn.Linear(4, CLASSES)

        def forward(self, inputs):
            return self.head(self.layer(inputs[:, :, None]).tanh().mean(dim=1))

    engine, state = trained(lambda: seeded(Tokens(), 0))
    outcome = forgotten(engine, state, LEAVER, dataclasses.replace(OPTIONS, coupled=coupled))
    assert any("curve together" in warning for warning in outcome.warnings) == (not coupled)
    assert ("stiffness" in outcome.details) == bool(coupled)
    engine, state = trained()
    plain = forgotten(engine, state, LEAVER, OPTIONS)
    assert not any("curve together" in warning for warning in plain.warnings)
    assert "stiffness" not in plain.details


@pytest.mark.parametrize(("rule", "part"), [(SGD(), 1.0), (SGD(momentum=0.5), 1.0), (AdamW(), 0.5)])
def test_under_adam_alone_a_part_of_the_way_is_gone(rule, part, monkeypatch):
    asked = []

    class Watched(Calibration):
        def __call__(self, stay, moved):
            asked.append(self.part)
            return super().__call__(stay, moved)

    monkeypatch.setattr("expunge.unlearning.retrace.Calibration", Watched)
    engine = WatchedEngine(mlp(), CrossEntropy(), DATA)
    plan = TrainingPlan(rounds=3, epochs=1, batch_size=12, learning_rate=0.02, recipe=Recipe(rule))
    state = train(engine, Snapshot.of(mlp()), plan)
    forgotten(engine, state, LEAVER, OPTIONS)
    assert asked
    assert set(asked) == {part}
