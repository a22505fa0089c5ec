"""Whether what was forgotten stays so: everybody who stays goes on training, from every model alike.

What was only hidden may come back, as `expunge audit --persistence` asks of one model (auditing/later.py). Here the
trained model, the forgotten one and every retrained one go on for the same rounds with the same shuffling.
"""

from __future__ import annotations

import dataclasses

from expunge.bench.scales import Scale
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.trainings import plans
from expunge.federation.training.plan import TrainingPlan

CONTENDERS = (Contender("retrace"),)
SEEDS = {"smoke": (10,), "small": tuple(range(20, 44)), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
RETRAINS = 3
FIRST = "SGD"
"""The training that is followed over all rounds and seeds."""
MORE_ROUNDS = {"smoke": (0, 1), "small": (0, 5, 10, 15), "paper": (0, 5, 10, 15)}


def persistence(scale: Scale) -> list[Setting]:
    """A strong backdoor was forgotten, and those who stay go on; in the other trainings for one seed, to the end."""
    own = scale.on("fashion-mnist") if scale.name == "paper" else scale
    rounds, ways = MORE_ROUNDS[scale.name], plans(scale, 1 if scale.is_smoke else 2)
    found = [_setting(own, FIRST, ways[FIRST], more) for more in rounds]
    for name, plan in ways.items():
        if name != FIRST and not scale.is_smoke:
            ends = [_setting(own, name, plan, more) for more in (rounds[0], rounds[-1])]
            found += [dataclasses.replace(setting, seeds=1) for setting in ends]
    return found


def _setting(scale: Scale, training: str, plan: TrainingPlan, more: int) -> Setting:
    own = scale.with_clients(20) if plan.participation < 1 else scale
    return Setting(
        f"{training}, {more} more rounds",
        dataclasses.replace(own.attacked(scale.leaver, strong=True), plan=plan),
        (Forget((scale.leaver,)),),
        CONTENDERS,
        RETRAINS,
        same_init=1,
        more_rounds=more,
    )
