"""The server: trains the hospitals' model, or forgets one of them.

flwr run .                                            train
flwr run . --run-config 'forget="hospital-2"'         forget, weeks later: the hospital may have gone
flwr run . --run-config 'resume=true'                 go on after a crash in the middle of that
flwr run . --run-config 'requests="federation.py"'    work on the requests in the ledger beside that file
"""

from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from expunge.flower import Recorder, forget, resume, work
from flower_app.task import Net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run: train where nobody is to be forgotten."""
    model, config = Net(), context.run_config
    if config["requests"]:
        work(grid, config["requests"], method=config["method"], deadline=config["deadline"])
        return
    if config["forget"] or config["resume"]:
        forget_sites(grid, config, model)
    else:
        train(grid, config, model)
    print(", ".join(f"{name} {value:.3f}" for name, value in test(model).items()))


def train(grid: Grid, config: dict[str, Any], model: nn.Module) -> None:
    """Rounds of FedAvg; where the store has a model already, they go on from there."""
    recorder = Recorder(
        FedAvg(fraction_train=config["fraction-train"], fraction_evaluate=0.0),
        model=model,
        store=config["store"],
        batch_size=config["batch-size"],
    )
    local = {name: config[name] for name in ("learning-rate", "batch-size", "local-epochs")}
    rounds = config["num-server-rounds"]
    result = recorder.start(grid, recorder.arrays, num_rounds=rounds, train_config=ConfigRecord(local))
    model.load_state_dict(result.arrays.to_torch_state_dict())


def forget_sites(grid: Grid, config: dict[str, Any], model: nn.Module) -> None:
    """Take hospitals out of the model in the store."""
    if config["resume"]:
        outcome = resume(grid, store=config["store"], model=model, deadline=config["deadline"])
    else:
        names = [name.strip() for name in config["forget"].split(",")]
        outcome = forget(
            grid, names, store=config["store"], model=model, method=config["method"], deadline=config["deadline"]
        )
    print(*outcome.warnings, f"{outcome.method}: {outcome.cost}", sep="\n")
    outcome.write_to(model)
