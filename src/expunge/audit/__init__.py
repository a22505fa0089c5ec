"""The room `audit`."""
