"""A hospital: trains on its own data, and can be forgotten."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from expunge.flower import Site, unlearnable
from flower_app.task import Net, load_data, train


def site(context: Context) -> Site:
    """Who this is, and what it trains with."""
    partition, partitions = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    name = str(context.node_config.get("name", f"hospital-{partition + 1}"))
    return Site(name, Net(), load_data(name, partition, partitions))


app = unlearnable(ClientApp(), site)


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """One round of local training, as in any Flower app."""
    here, config = site(context), message.content["config"]
    here.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    seed = 1000 * config["server-round"] + int(context.node_config["partition-id"])
    settings = (config["local-epochs"], config["batch-size"], config["learning-rate"])
    loss = train(here.model, here.data, here.name, *settings, seed)
    metrics = MetricRecord({"num-examples": len(here.data[1]), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(here.model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
