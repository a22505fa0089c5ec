"""Two clients with one trigger leave together a federation in which every client has few labels.

There the two worst cases meet: nobody who stays knows the leavers' labels as they do, and each leaver's pull hides a
part of the other's.
"""

from __future__ import annotations

import dataclasses

from expunge.bench.scales import Scale
from expunge.bench.settings import Contender, Forget, Setting

ALPHA = 0.1
CONTENDERS = (
    Contender("fine-tuning"),
    Contender("retrace-krylov"),
    Contender("retrace"),
    Contender("retrace+recovery"),
)
SEEDS = {"smoke": (10,), "small": (20, 21, 22), "paper": (20, 21, 22)}
"""Seeds that nothing was chosen on."""


def colluders(scale: Scale) -> list[Setting]:
    """The scale's leaver and the client before it; at the paper's scale MNIST, where a strong attack boosts twofold."""
    own = scale.on("mnist") if scale.name == "paper" else scale
    before = own.base.names[own.base.names.index(scale.leaver) - 1]
    leaving = (before if before != "client-0" else "client-2", scale.leaver)  # settings were chosen on client 0
    scenario = dataclasses.replace(own.attacked(*leaving, strong=True), alpha=ALPHA)
    label = f"{scenario.dataset}, alpha={ALPHA}, two leave"
    return [Setting(label, scenario, (Forget(leaving),), CONTENDERS, scale.other_retrains, same_init=1)]
