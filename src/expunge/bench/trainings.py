"""Experiments about how federations train: optimisers, schedules, server rules; samples and clients without vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from expunge.bench.scales import Scale
from expunge.bench.scenario import Scenario
from expunge.bench.settings import Contender, Forget, Setting
from expunge.federation.training.plan import TrainingPlan
from expunge.federation.training.recipe import SGD, Adam, AdamW, FedAvgM, Recipe

CONTENDERS = (Contender("hf-kcu"), Contender("retrace"))
SEEDS = {"smoke": (10,), "small": (20, 21), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
FEWER = ("SGD", "AdamW, cosine", "FedAvgM")
"""What CIFAR-10 is trained with."""


def plans(scale: Scale, epochs: int) -> Mapping[str, TrainingPlan]:
    """The trainings by name; rates were chosen for how well client 0's federation learns, small ones are five times."""
    base, factor = scale.base.plan, 1.0 if scale.name == "paper" else 5.0
    plan = dataclasses.replace(base, epochs=epochs, learning_rate=0.02 * factor)
    adam = dataclasses.replace(plan, learning_rate=0.001 * (1.0 if factor == 1 else 3.0), recipe=Recipe(Adam()))
    return {
        "SGD": plan,
        "SGD, cosine": dataclasses.replace(plan, learning_rate=0.03 * factor, cosine=True),
        "momentum": dataclasses.replace(plan, learning_rate=0.003 * factor, recipe=Recipe(SGD(momentum=0.9))),
        "Adam": adam,
        "AdamW, cosine": dataclasses.replace(adam, recipe=Recipe(AdamW()), cosine=True),
        "FedAvgM": dataclasses.replace(plan, recipe=Recipe(server=FedAvgM(0.3, 0.9))),
        "a quarter of 20 clients a round": dataclasses.replace(plan, rounds=2 * base.rounds, participation=0.25),
        "unequal epochs": dataclasses.replace(plan, epochs=2 * epochs - 1, min_epochs=1),
    }


def trainings(scale: Scale) -> list[Setting]:
    """A strong backdoor leaves a federation that was trained in each of these ways."""
    if scale.is_smoke:
        chosen = {name: plans(scale, 1)[name] for name in ("Adam", "FedAvgM")}
        return [_setting(scale, scale.base.dataset, name, plan) for name, plan in chosen.items()]
    dataset = "fashion-mnist" if scale.name == "paper" else scale.base.dataset
    found = [_setting(scale, dataset, name, plan) for name, plan in plans(scale, 2).items()]
    if scale.name == "paper":
        found += [_setting(scale, "cifar10", name, plans(scale, 3)[name]) for name in FEWER]
    return found


def replay(scale: Scale) -> list[Setting]:
    """Samples whose client stays, and a client that no vector was kept of: the owners replay a few rounds."""
    own = scale.on("fashion-mnist") if scale.name == "paper" else scale
    plan, leaver = plans(scale, 1 if scale.is_smoke else 2)["SGD"], scale.leaver
    strong, weak = (own.attacked(leaver, strong=kind) for kind in (True, False))
    requests: dict[str, tuple[Scenario, Forget]] = {
        "poisoned samples, boosted": (strong, Forget(triggered=(leaver,))),
        "poisoned samples": (weak, Forget(triggered=(leaver,))),
        "a fifth of a clean client": (own.base, Forget(shares={leaver: 0.2})),
        "a client without vectors": (strong, Forget((leaver,))),
    }
    found = []
    for label, (scenario, forget) in requests.items():
        options = {"source": "replay"} if forget.clients else {}
        contenders = (Contender("hf-kcu"), Contender("retrace", options))
        scenario = dataclasses.replace(scenario, plan=plan)
        found.append(Setting(label, scenario, (forget,), contenders, scale.retrains, same_init=1))
    return found


def _setting(scale: Scale, dataset: str, name: str, plan: TrainingPlan) -> Setting:
    own = scale.on(dataset) if scale.name == "paper" else scale
    own = own.with_clients(20) if plan.participation < 1 else own
    scenario = dataclasses.replace(own.attacked(scale.leaver, strong=True), plan=plan)
    label = f"{dataset}, {name}"
    return Setting(label, scenario, (Forget((scale.leaver,)),), CONTENDERS, scale.retrains, same_init=1)
