"""A Flower app that fine-tunes LoRA adapters of a small GPT-2 on a few sites, and can forget each of them."""
