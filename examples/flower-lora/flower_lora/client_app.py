"""A site: fine-tunes the adapters on its own sentences, and can be forgotten."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from expunge.flower import Site, unlearnable
from flower_lora.task import SITES, adapted, fit, sentences


def site(context: Context) -> Site:
    """Who this is, and what it trains with."""
    name = str(context.node_config.get("name", SITES[int(context.node_config["partition-id"])]))
    return Site(name, adapted(), {"input_ids": sentences(name), "labels": sentences(name)})


app = unlearnable(ClientApp(), site)


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """One round of local training; only the adapters come and go."""
    torch.set_num_threads(1)  # on a model of this size, a second thread costs more than it brings
    here, config = site(context), message.content["config"]
    set_peft_model_state_dict(here.model, message.content["arrays"].to_torch_state_dict())
    seed = 1000 * config["server-round"] + int(context.node_config["partition-id"])
    tokens = sentences(here.name)
    loss = fit(here.model, tokens, config["local-epochs"], config["batch-size"], config["learning-rate"], seed)
    metrics = MetricRecord({"num-examples": len(tokens), "loss": loss})
    content = RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(here.model)), "metrics": metrics})
    return Message(content, reply_to=message)
