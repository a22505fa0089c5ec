"""What is seen of torch's optimisers from outside is what they did, for what is sent and for nothing else."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from expunge.errors import RequestError
from expunge.federation.training import watching
from expunge.federation.training.recipe import SGD, Adam, AdamW, second_moments
from expunge.federation.training.watching import Watch
from federation.small import FEATURES, mlp, norm_net, samples

INPUTS, LABELS = samples(12)


def steps(model, optimiser, count=3, schedule=None) -> None:
    for number in range(count):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(INPUTS[number:]), LABELS[number:]).backward()
        optimiser.step()
        if schedule is not None:
            schedule.step()


def arrays(model, only="", factor=1.0):
    return lambda: {k: factor * v.numpy() for k, v in model.state_dict().items() if k.startswith(only)}


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), SGD()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), SGD(momentum=0.9)),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01),
            SGD(momentum=0.5, nesterov=True, weight_decay=0.01),
        ),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.2), SGD(momentum=0.5, dampening=0.2)),
        (lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.2), SGD()),  # of nothing
        (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.99), eps=1e-6), Adam((0.8, 0.99), 1e-6)),
        (lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01), Adam(weight_decay=0.01)),
        (lambda p: torch.optim.Adam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.01), AdamW()),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5)), AdamW()),
    ],
)
def test_each_optimiser_is_read(made, rule):
    model = mlp()
    with Watch() as watch:
        optimiser = made(model.parameters())
        steps(model, optimiser)
    note = watch.note(arrays(model))
    assert (note.rule, note.steps, note.problem, note.apart) == (rule, 3, "", ())
    assert note.learning_rate == float(optimiser.param_groups[0]["lr"])
    if rule.adaptive:
        assert dict(note.moments) == dict(zip(model.state_dict(), second_moments(optimiser), strict=True))
    else:
        assert note.moments == {}


def test_a_rate_that_falls_within_the_round_is_told_by_its_mean():
    model = mlp()
    with Watch() as watch:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.4)
        steps(model, optimiser, schedule=lr_scheduler.ExponentialLR(optimiser, 0.5))
    assert watch.note(arrays(model)).learning_rate == pytest.approx((0.4 + 0.2 + 0.1) / 3)


def test_nothing_is_seen_outside_or_in_another_thread():
    model = mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch() as watch:
        thread = threading.Thread(target=steps, args=(model, optimiser))
        thread.start()
        thread.join()
    steps(model, optimiser)
    assert watch.note(arrays(model)) is None


def test_the_hooks_go_even_where_training_fails():
    model, watch = mlp(), Watch()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def training():
        with watch:
            steps(model, optimiser, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    steps(model, optimiser)
    assert watch.note(arrays(model)).steps == 1


def test_a_closure_counts_as_one_step():
    model = mlp()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(INPUTS), LABELS)
        loss.backward()
        return loss

    with Watch() as watch:
        optimiser.step(closure)
    assert watch.note(arrays(model)).steps == 1


def decay_groups(model):
    """As transformers have it: no decay on biases; so the parameters come in another order than in the model."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def test_groups_that_differ_in_weight_decay_are_one_rule_with_its_mean_and_moments_keep_their_names():
    model = mlp()
    with Watch() as watch:
        optimiser = torch.optim.AdamW(decay_groups(model), lr=0.1)
        steps(model, optimiser)
    note = watch.note(arrays(model))
    weights, biases = 3 * 4 + 4 * 3, 4 + 3
    assert note.rule == AdamW(weight_decay=0.1 * weights / (weights + biases))
    told = dict(zip(("0.weight", "2.weight", "0.bias", "2.bias"), second_moments(optimiser), strict=True))
    assert dict(note.moments) == told


def test_weights_that_were_changed_before_they_are_sent_are_known_by_their_shapes():
    model = norm_net()
    with Watch() as watch:
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        steps(model, optimiser)
    note = watch.note(arrays(model, factor=4))
    names = [name for name, _ in model.named_parameters()]
    assert dict(note.moments) == dict(zip(names, second_moments(optimiser), strict=True))


def test_only_what_is_sent_counts():
    """A personal head with another optimiser, trained first and more often."""
    model = mlp()
    with Watch() as watch:
        model[0].requires_grad_(False)
        steps(model, torch.optim.Adam(model[2].parameters(), lr=0.5), count=5)
        model.requires_grad_(True)
        model[2].requires_grad_(False)
        model.zero_grad()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), count=2)
    note = watch.note(arrays(model, only="0."))
    assert (note.rule, note.learning_rate, note.steps, note.problem) == (SGD(momentum=0.9), 0.1, 2, "")


def test_one_optimiser_for_head_and_body_in_turns():
    """As FedRep does: who has no gradient makes no step."""
    model = mlp()
    with Watch() as watch:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for head, count in ((True, 4), (False, 2)):
            model[0].requires_grad_(not head)
            model[2].requires_grad_(head)
            model.zero_grad()
            steps(model, optimiser, count)
    assert watch.note(arrays(model, only="0.")).steps == 2
    assert watch.note(arrays(model, only="2.")).steps == 4
    assert watch.note(arrays(model)).steps == pytest.approx((16 * 2 + 15 * 4) / 31)
    assert watch.note(arrays(model)).problem.startswith("trains with several rules, learning rates or numbers of steps")


def carried(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    steps(model, optimiser)
    return lambda: steps(model, optimiser)


def remade(model):
    return lambda: [steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 1) for _ in range(2)]


def cycled(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cycle = lr_scheduler.OneCycleLR(optimiser, 0.2, total_steps=6)
    return lambda: steps(model, optimiser, schedule=cycle)


def other_decay(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    def train():
        steps(model, optimiser)
        optimiser.param_groups[0]["weight_decay"] = 0.2
        steps(model, optimiser)

    return train


def two_rates(model):
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.4}]
    return lambda: steps(model, torch.optim.SGD(groups))


@pytest.mark.parametrize(
    ("train", "problem", "rate"),
    [
        (carried, "carries the state of its Adam from one round to the next", 0.1),
        (remade, "begins anew with SGD with momentum within a round", 0.1),
        (
            cycled,
            "trains with several rules, learning rates or numbers of steps in one round (an optimiser's settings",
            None,
        ),
        (other_decay, "trains with several rules", 0.1),
        (two_rates, "trains with several rules", (16 * 0.1 + 15 * 0.4) / 31),
        (lambda m: lambda: steps(m, torch.optim.RMSprop(m.parameters(), lr=0.1)), "trains with RMSprop, whose", 0.1),
        (
            lambda m: lambda: steps(m, torch.optim.Adam(m.parameters(), lr=0.1, amsgrad=True)),
            "trains with Adam with amsgrad, whose recursion is not known here",
            0.1,
        ),
        (
            lambda m: lambda: steps(m, torch.optim.SGD(m.parameters(), lr=0.1, maximize=True)),
            "trains with SGD with maximize, whose",
            0.1,
        ),
    ],
)
def test_what_no_one_rule_describes_is_told(train, problem, rate):
    model = mlp()
    handler = train(model)
    with Watch() as watch:
        handler()
    note = watch.note(arrays(model))
    assert note.rule is None
    assert note.problem.startswith(problem)
    assert note.learning_rate == pytest.approx(rate) if rate else note.learning_rate > 0


def test_plain_sgd_may_be_made_as_often_as_one_likes():
    """It has no state to lose or to carry."""
    model = mlp()
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(model, kept)
    with Watch(arrays(model)) as watch:
        steps(model, kept, 2)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    note = watch.note(arrays(model))
    assert (note.rule, note.steps, note.learning_rate, note.apart) == (SGD(), 4, 0.1, ())


def test_parameters_of_the_same_values_are_told_apart_by_their_order():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    with Watch() as watch:
        optimiser = torch.optim.Adam(model.parameters(), lr=0.0)
        steps(model, optimiser)
    note = watch.note(arrays(model))
    assert dict(note.moments) == dict(zip(model.state_dict(), second_moments(optimiser), strict=True))


@pytest.mark.parametrize(
    ("made", "l2", "decay"),
    [
        (torch.optim.SGD, 0.01, 0.0),
        (torch.optim.Adam, 0.01, 0.0),
        (torch.optim.SGD, 0.02, 0.01),
        (torch.optim.SGD, 0.0, 0.01),
        (torch.optim.AdamW, 0.01, 0.01),
    ],
)
def test_weight_decay_that_the_sites_loss_has_already_does_not_count_twice(made, l2, decay):
    model = nn.Linear(FEATURES, 3).double()
    with Watch() as watch:
        steps(model, made(model.parameters(), lr=0.1, weight_decay=0.01))
    assert watch.note(arrays(model), l2).rule.weight_decay == decay


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_what_does_not_begin_with_what_was_received_is_told(precision):
    """A head that is kept at the site between rounds, and sent all the same."""
    received = mlp().float()
    model = mlp().to(precision)
    model[2] = nn.Linear(4, 3).to(precision)
    with Watch(arrays(received)) as watch:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(INPUTS.to(precision)).sum().backward()
            optimiser.step()
    model.float()
    assert watch.note(arrays(model)).apart == ("2.weight", "2.bias")
    assert watch.note(arrays(model, only="0.")).apart == ()
    with Watch(arrays(model)) as watch:
        steps(model.double(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert watch.note(arrays(model)).apart == ()


@pytest.mark.parametrize(("far", "apart"), [(1e-7, 0), (1e-3, 4)])
def test_values_that_rounding_alone_has_changed_are_those_that_came(far, apart):
    """As where a step looks at the gradient elsewhere first, and moves the weights there and back."""
    model = mlp().float()
    came = {name: array.copy() for name, array in arrays(model)().items()}
    with Watch(lambda: came) as watch:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + far)
        steps(model.double(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(watch.note(arrays(model)).apart) == apart


def test_what_was_trained_and_is_not_sent():
    model = mlp()
    with Watch() as watch:
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert watch.kept_back(arrays(model)()) == []
    back = watch.kept_back(arrays(model, only="0.")())
    assert {id(each) for each in back} == {id(model[2].weight), id(model[2].bias)}
    spoilt = {name: array + 1 for name, array in arrays(model)().items()}
    assert watch.kept_back(spoilt) == []  # clipped or noisy: nothing is known again


def test_steps_that_a_graph_makes_again_cannot_be_watched(monkeypatch):
    model = mlp()
    monkeypatch.setattr(watching, "is_recorded", lambda: True)
    with Watch(), pytest.raises(RequestError, match=r"CUDA graph .* cannot be watched: train without"):
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
