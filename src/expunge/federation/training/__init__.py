"""How a federation trains: its plan, its schedule as unlearning sees it, FedAvg, and training in shards."""
