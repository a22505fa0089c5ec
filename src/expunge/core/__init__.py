"""The room `core`."""
