"""The version, in a file that imports nothing."""

__version__ = "0.5.5"
