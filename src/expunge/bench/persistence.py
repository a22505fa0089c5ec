"""Whether what was forgotten stays so: everybody who stays goes on training, from every model alike.

What was only hidden may come back, as `expunge audit --persistence` asks of one model (auditing/later.py). Here the
trained model, the forgotten one and every retrained one go on for the same rounds with the same shuffling.
"""

from __future__ import annotations

import dataclasses

from expunge.bench.scales import Scale
from expunge.bench.settings import Contender, Forget, Setting
from expunge.bench.trainings import plans

CONTENDERS = (Contender("retrace"),)
SEEDS = {"smoke": (10,), "small": tuple(range(20, 44)), "paper": (20, 21)}
"""Seeds that nothing was chosen on."""
MORE_ROUNDS = {"smoke": (0, 1), "small": (0, 5, 10, 15), "paper": (0, 5, 10, 15)}


def persistence(scale: Scale) -> list[Setting]:
    """A strong backdoor was forgotten, and those who stay go on; for one seed also in the other trainings."""
    own = scale.on("fashion-mnist") if scale.name == "paper" else scale
    rounds, dataset = MORE_ROUNDS[scale.name], own.base.dataset
    found = [_setting(own, dataset, more) for more in rounds]
    for name, plan in {} if scale.is_smoke else plans(scale, 2).items():
        trained = own.with_clients(20) if plan.participation < 1 else own
        trained = dataclasses.replace(trained, base=dataclasses.replace(trained.base, plan=plan))
        ends = [_setting(trained, f"{dataset}, {name}", more) for more in (rounds[0], rounds[-1])]
        found += [dataclasses.replace(setting, seeds=1) for setting in ends]
    return found


def _setting(scale: Scale, training: str, more: int) -> Setting:
    return Setting(
        f"{training}, {more} more rounds",
        scale.attacked(scale.leaver, strong=True),
        (Forget((scale.leaver,)),),
        CONTENDERS,
        scale.other_retrains,
        same_init=1,
        more_rounds=more,
    )
