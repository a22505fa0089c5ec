"""NoT (Khalil et al., CVPR 2025, "NoT: Federated Unlearning via Weight Negation"): negate a layer, then fine-tune.

    theta_l <- -theta_l  for the first layer;  then FedAvg rounds of the clients that stay

The negated layer no longer fits the ones above it, so everything is learned anew, and what only the leaver knew is
not learned again. "The first layer" is the module that owns the first parameter called ``weight``: its weight and,
where it has one, its bias (of the CNN and the ResNet the first convolution, of the ViT the patch embedding). Needs
neither the leaver nor its data.

Where it fails: forgetting and accuracy are both left to the rounds. Few of them leave the model poor, many relearn at
the price of retraining; nothing in it knows whose data is to be forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from expunge.core.vectors import Layout, Snapshot
from expunge.federation.engines.engine import Engine, measured
from expunge.federation.keeping.state import ServerState
from expunge.unlearning.preparation import forgotten_memory, memory_warnings, prepared
from expunge.unlearning.recovery import LocalTraining, fedavg_rounds
from expunge.unlearning.registry import Method, Outcome, register
from expunge.unlearning.request import Request
from expunge.unlearning.retained import Retained


@dataclass(frozen=True)
class NegationOptions(LocalTraining):
    """Options of NoT.

    Attributes:
        epochs: local epochs a round.
        learning_rate: None takes the training's.
        batch_size: None takes the training's.
        seed: of the clients' shuffling.
        rounds: FedAvg rounds of the clients that stay.
    """

    rounds: int = 4


def negation(engine: Engine, state: ServerState, request: Request, options: NegationOptions) -> Outcome:
    """Negate the first layer, then let the clients that stay train.

    Args:
        engine: reaches the clients that stay.
        state: the trained model, its snapshot with layers; it is left untouched.
        request: what is to be forgotten.
        options: rounds and local training.
    """
    parties = prepared(engine, state, request)
    plan = options.plan(state, options.rounds)
    names = first_layer(state.model.layers())
    memory, stay = forgotten_memory(state, parties), Retained.of(engine, state, parties)
    with measured(engine) as cost:
        model = stay.statistics(negated(state.model, names))
        model = fedavg_rounds(stay, model, memory, plan)
    details = {"negated": list(names)}
    return Outcome("not", state.moved(model, memory), cost, details=details, warnings=memory_warnings(parties, memory))


def first_layer(layout: Layout) -> tuple[str, ...]:
    """Names of the parameters of the module that owns the first ``weight``.

    Example:
        >>> from torch import nn
        >>> first_layer(Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))))
        ('0.weight', '0.bias')
    """
    names = [name for name, _ in layout.shapes]
    first = next((name for name in names if name.rpartition(".")[2] == "weight"), names[0])
    return tuple(name for name in names if name.rpartition(".")[0] == first.rpartition(".")[0])


def negated(model: Snapshot, names: tuple[str, ...]) -> Snapshot:
    """The model with the sign of these parameters turned."""
    layout = model.layers()
    parts = layout.unflatten(model.parameters)
    turned = {name: -part if name in names else part for name, part in parts.items()}
    return model.moved(layout.flatten(turned))


register(
    Method(
        "not",
        negation,
        NegationOptions(),
        "negate the first layer's weights, then rounds of the clients that stay",
    )
)
