"""The room `bench`."""
