"""The room `federation`."""
