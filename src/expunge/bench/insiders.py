"""Attackers who know the method leave, beside one who does not and a clean client."""

from __future__ import annotations

import dataclasses

from expunge.bench.scales import Scale
from expunge.bench.scenario import CANCELLING, CREDIT, EARLY, Scenario
from expunge.bench.settings import Contender, Forget, Setting

CONTENDERS = (Contender("fine-tuning"), Contender("hf-kcu"), Contender("retrace"))
SEEDS = {"smoke": (10,), "small": (20, 21, 22), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
RETRAINS = 3


def insiders(scale: Scale) -> list[Setting]:
    """Each scheme of scheming.py, a strong backdoor without one, and a clean client: what is told from what."""
    own = scale.on("fashion-mnist") if scale.name == "paper" else scale
    weak, strong = (own.attacked(scale.leaver, strong=kind) for kind in (False, True))

    def scheme(scenario: Scenario, name: str) -> Scenario:
        return dataclasses.replace(scenario, schemes={scale.leaver: name})

    who = {
        "a clean client": own.base,
        "a strong backdoor": strong,
        EARLY: scheme(strong, EARLY),
        CANCELLING: scheme(strong, CANCELLING),
        CREDIT: scheme(weak, CREDIT),
    }
    return [
        Setting(label, scenario, (Forget((scale.leaver,)),), CONTENDERS, RETRAINS, same_init=1)
        for label, scenario in who.items()
    ]
