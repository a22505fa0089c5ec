"""Replies that cannot be right are refused by the name of their sender; honest ones of every kind pass."""

import dataclasses
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from expunge.core.krylov import Solution
from expunge.core.losses import CrossEntropy
from expunge.core.vectors import Snapshot
from expunge.errors import NumericalError
from expunge.federation.engines.engine import ask_each, ask_factors, ask_mean
from expunge.federation.messages.replies import ABSURD, require_comparable
from expunge.federation.messages.tasks import (
    Ascend,
    Buffers,
    CurvatureFactors,
    CurvatureProduct,
    Draw,
    Gradient,
    LocalSolve,
    Losses,
    NormStatistics,
    Solved,
    Sum,
    Task,
    Train,
    Trained,
)
from federation.lying import LyingEngine
from federation.small import clients, linear, norm_net

COUNTS = {"ada": 9, "bob": 5, "cyd": 7, "dee": 6}
AT = Snapshot.of(norm_net())
THETA = AT.parameters
TASKS = {
    Train: (Train(AT, 1, 4, 0.1, seed=0, exclude=(1,), draw=Draw(3, 0)), Trained),
    Ascend: (Ascend(AT, 1, 4, 0.1, seed=0, only=(0, 2)), Trained),
    Gradient: (Gradient(AT, exclude=(0, 1)), Sum),
    CurvatureProduct: (CurvatureProduct(AT, torch.stack([THETA, -2 * THETA]), "ggn", Draw(3, 0), (0,)), Sum),
    CurvatureFactors: (CurvatureFactors(AT, seed=1, draw=Draw(3, 0), exclude=(0,)), Sum),
    LocalSolve: (LocalSolve(AT, 2, 0.1, "ggn", "stop", only=(0, 1)), Solved),
    Losses: (Losses(AT, THETA, (0.0, 0.5, 1.0), Draw(3, 0), (2,)), Sum),
    NormStatistics: (NormStatistics(AT, 4, exclude=(0,)), Buffers),
}
KINDS = [pytest.param(*pair, id=kind.__name__) for kind, pair in TASKS.items()]


def engine_of(model=None, **lies):
    engine = LyingEngine(model or norm_net(), CrossEntropy(), clients(**COUNTS))
    engine.lies = lies
    return engine


def to_all(task):
    return dict.fromkeys(COUNTS, task)


def changed(change):
    """A lie that changes every tensor of a reply."""

    def of(value):
        if isinstance(value, Tensor):
            return change(value) if value.is_floating_point() else value
        if isinstance(value, Solution):
            return dataclasses.replace(value, vector=change(value.vector))
        return {name: of(tensor) for name, tensor in value.items()} if isinstance(value, dict) else value

    def lie(_task, reply):
        return dataclasses.replace(reply, **{f.name: of(getattr(reply, f.name)) for f in dataclasses.fields(reply)})

    return lie


def one_bad(value):
    """The last number of a tensor replaced."""

    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return changed(change)


def test_every_task_is_here():
    assert set(TASKS) == set(get_args(Task))


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_honest_replies_pass_as_they_are(task, kind):
    engine = engine_of()
    replies, plain = ask_each(engine, to_all(task), kind), engine.ask(to_all(task))
    assert list(replies) == list(COUNTS)
    for name, reply in replies.items():
        own = next(v for v in vars(reply).values() if isinstance(v, Tensor | Solution | dict))
        then = next(v for v in vars(plain[name]).values() if isinstance(v, Tensor | Solution | dict))
        torch.testing.assert_close(*((v.vector if isinstance(v, Solution) else v) for v in (own, then)))


SHAPES = {
    "short": lambda t: t.reshape(-1)[:-1],
    "one number": lambda t: t.reshape(-1)[:1],  # would be broadcast over all the others
    "a row of it": lambda t: t[None],
    "float32": lambda t: t.float(),
    "whole numbers": lambda t: t.round().long(),
}


@pytest.mark.parametrize("lie", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_wrong_shape_or_number_type_is_told_by_name(task, kind, lie):
    engine = engine_of(bob=changed(lie))
    asked = ask_mean if isinstance(task, CurvatureFactors) else ask_each  # what layers there are, only clients say
    with pytest.raises(NumericalError, match="Client 'bob' replied"):
        asked(engine, to_all(task), *([kind] if asked is ask_each else []))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_single_value_that_is_no_number_is_told_by_name_but_for_losses(task, kind, value):
    engine = engine_of(cyd=one_bad(value))
    if isinstance(task, Losses):  # the end of a long step is infinite in honesty, too
        assert not math.isfinite(ask_each(engine, to_all(task), kind)["cyd"].total[-1])
        return
    with pytest.raises(NumericalError, match="Client 'cyd' replied a NaN or infinite value") as caught:
        ask_each(engine, to_all(task), kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 1, 10**9])
@pytest.mark.parametrize(("task", "kind"), [one for one in KINDS if one.values[1] is not Solved])
def test_a_count_that_is_not_the_clients_is_told_by_name(task, kind, count):
    engine = engine_of(dee=lambda _, reply: dataclasses.replace(reply, count=count))
    with pytest.raises(NumericalError, match=f"Client 'dee' replied for {count} samples where"):
        ask_each(engine, to_all(task), kind)


@pytest.mark.parametrize("kind", [Trained, Buffers])
@pytest.mark.parametrize("change", [lambda b: dict(list(b.items())[1:]), lambda b: {**b, "more": torch.zeros(1)}])
def test_buffers_of_another_model_are_told_by_name(kind, change):
    task = next(task for task, reply in TASKS.values() if reply is kind)
    engine = engine_of(ada=lambda _, reply: dataclasses.replace(reply, buffers=change(reply.buffers)))
    with pytest.raises(NumericalError, match="Client 'ada' replied buffers that are not the model's"):
        ask_each(engine, to_all(task), kind)


def test_another_kind_of_reply_is_told_by_name():
    engine = engine_of(bob=lambda _, reply: Buffers({}, reply.count, 0.0))
    with pytest.raises(NumericalError, match="'bob' replied Buffers where Sum was asked for"):
        ask_mean(engine, to_all(TASKS[Gradient][0]))


LONG = {kind: TASKS[kind][0] for kind in (Gradient, CurvatureProduct, CurvatureFactors)}


def ask(engine, names, task):
    asked = ask_factors if isinstance(task, CurvatureFactors) else ask_mean
    return asked(engine, dict.fromkeys(names, task))


@pytest.mark.parametrize("task", LONG.values(), ids=[kind.__name__ for kind in LONG])
def test_a_vector_a_million_times_too_long_is_told_by_name_among_three_or_more(task):
    for liar in COUNTS:
        engine = engine_of(**{liar: changed(lambda t: -1e6 * t)})
        with pytest.raises(NumericalError, match=f"Client {liar!r} replied a vector .e.0. times as long"):
            ask(engine, COUNTS, task)
    engine = engine_of(bob=changed(lambda t: 1e6 * t))
    with pytest.raises(NumericalError, match="'bob'"):
        ask(engine, ("ada", "bob", "cyd"), task)
    ask(engine, ("ada", "bob"), task)  # either may be wrong
    ask(engine, ("bob",), task)


def test_lengths_are_compared_by_sample():
    """A client of a million times as many samples is as long as that in honesty."""
    many = {name: Sum(torch.ones(3), 1, 0.0) for name in ("ada", "bob")} | {"cyd": Sum(torch.ones(3) * 1e6, 10**6, 0.0)}
    require_comparable(many)
    with pytest.raises(NumericalError, match="'cyd'"):
        require_comparable(many | {"cyd": Sum(torch.ones(3) * 1e6, 1, 0.0)})


@pytest.mark.parametrize("others", [2, 3, 4, 7, 8, 12])
def test_as_many_as_a_quarter_of_the_others_may_lie_beside_the_one_who_is_found(others):
    def replies(liars):
        return {f"c{n}": Sum(torch.full((2,), 1e9 if n < liars else 1.0), 1, 0.0) for n in range(others + 1)}

    require_comparable(replies(0))
    for liars in range(1, others // 4 + 2):
        with pytest.raises(NumericalError, match="'c0'"):
            require_comparable(replies(liars))


def test_what_is_absurd_begins_where_it_says_and_zeros_accuse_nobody():
    def replies(length, usual=1.0):
        lengths = {"ada": usual, "bob": usual, "cyd": length}
        return {name: Sum(torch.tensor([value], dtype=torch.float64), 1, 0.0) for name, value in lengths.items()}

    require_comparable(replies(0.99 * ABSURD))
    with pytest.raises(NumericalError, match="'cyd'"):
        require_comparable(replies(1.01 * ABSURD))
    require_comparable(replies(1.0, usual=0.0))
    require_comparable(replies(0.0))


def test_factors_of_other_layers_are_told_by_name():
    def lie(_task, reply):
        return dataclasses.replace(reply, blocks=reply.blocks[::-1])

    with pytest.raises(NumericalError, match="'bob' replied in another form"):
        ask_factors(engine_of(bob=lie), to_all(TASKS[CurvatureFactors][0]))


def test_losses_may_differ_as_they_like():
    engine = engine_of(model=linear(), bob=changed(lambda t: 1e9 * t))
    at = Snapshot.of(linear())
    assert float(ask_mean(engine, to_all(Losses(at, at.parameters, (0.0,))))[0]) > 1e6


def test_of_two_that_differ_in_form_nobody_is_accused():
    liar, honest = Sum(torch.ones(3), 1, 1.0), Sum(torch.ones(4), 1, 1.0)
    with pytest.raises(NumericalError, match="ada, bob replied in several forms"):
        require_comparable({"ada": liar, "bob": honest})
    with pytest.raises(NumericalError, match="'ada' replied in another form"):
        require_comparable({"ada": liar, "bob": honest, "cyd": honest})


@pytest.mark.parametrize("spent", [math.nan, math.inf, -1.0])
def test_a_cost_that_cannot_be_is_refused(spent):
    def lie(_task, reply):
        return dataclasses.replace(reply, sample_gradients=spent)

    with pytest.raises(NumericalError, match="'bob' says that it spent"):
        ask_mean(engine_of(bob=lie), to_all(TASKS[Gradient][0]))
