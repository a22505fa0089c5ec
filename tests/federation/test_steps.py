"""Who listens to torch's steps may come and go while others make one."""

import gc
import threading

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from expunge.federation.training import steps
from expunge.federation.training.onlooker import Onlooker
from expunge.federation.training.watching import Watch


class Listener:
    def __init__(self):
        self.told = []

    def before_step(self, optimiser):
        self.told.append(("before", optimiser))

    def after_step(self, optimiser):
        self.told.append(("after", optimiser))


def optimiser():
    model = nn.Linear(2, 1)
    model(torch.ones(3, 2)).sum().backward()
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_listener_is_told_of_every_step_until_it_leaves_or_is_gone():
    own, one, other = optimiser(), Listener(), Listener()
    steps.listen(one)
    steps.listen(other)
    own.step()
    assert one.told == other.told == [("before", own), ("after", own)]
    steps.leave(one)
    own.step()
    assert len(one.told) == 2
    assert len(other.told) == 4
    del other
    gc.collect()
    own.step()
    steps.listen(one)
    assert [each() for each in steps._listeners].count(one) == 1


def test_listeners_that_come_and_go_within_a_step_harm_nobody():
    # The garbage collector may run inside any step, and a memory that it takes has an onlooker.
    def busy(own, arguments, named):
        Onlooker([torch.Size([1])])
        gc.collect()
        with Watch():
            pass

    hook = register_optimizer_step_post_hook(busy)
    try:
        for _ in range(3):
            optimiser().step()
    finally:
        hook.remove()


def test_listeners_that_come_and_go_in_another_thread_harm_nobody():
    ended, problems = threading.Event(), []

    def comes_and_goes():
        while not ended.is_set():
            with Watch():
                Onlooker([torch.Size([1])])

    thread = threading.Thread(target=comes_and_goes)
    thread.start()
    try:
        own = optimiser()
        for _ in range(2000):
            own.step()
    except RuntimeError as problem:
        problems.append(problem)
    finally:
        ended.set()
        thread.join()
    assert not problems
