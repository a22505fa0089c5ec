"""expunge: take a client's contribution out of a federated model, and show how well it is gone."""

__version__ = "0.1.0"
