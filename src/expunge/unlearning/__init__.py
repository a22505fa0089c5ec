"""The room `unlearning`."""
