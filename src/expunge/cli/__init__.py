"""The command line: thin. Each command reads its arguments, calls the library, shows what came out.

A command's file imports the library inside its function: help, version and tab completion start without torch.
"""

# Each adds its command, in the order of the help.
from expunge.cli import demo, train, forget, show, audit, methods, bench  # noqa: F401, I001
from expunge.cli import init, request, request_work, status, receipt, serve  # noqa: F401
from expunge.cli.app import main

__all__ = ["main"]
