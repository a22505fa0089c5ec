"""The server: fine-tunes the sites' adapters, or forgets one of the sites.

flwr run .                                        train
flwr run . --run-config 'forget="site-2"'         forget, weeks later: the site may have gone
"""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import set_peft_model_state_dict

from expunge.flower import Recorder, forget
from flower_lora.task import adapted, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run: train where nobody is to be forgotten."""
    model, config = adapted(), context.run_config
    if config["forget"]:
        names = [name.strip() for name in config["forget"].split(",")]
        forget(grid, names, store=config["store"], model=model).write_to(model)
    else:
        recorder = Recorder(FedAvg(fraction_evaluate=0.0), model=model, store=config["store"])
        local = {name: config[name] for name in ("learning-rate", "batch-size", "local-epochs")}
        rounds = config["num-server-rounds"]
        result = recorder.start(grid, recorder.arrays, num_rounds=rounds, train_config=ConfigRecord(local))
        set_peft_model_state_dict(model, result.arrays.to_torch_state_dict())
    print(", ".join(f"{name} {value:.3f}" for name, value in test(model).items()))
