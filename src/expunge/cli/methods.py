"""`expunge methods`."""

from __future__ import annotations

from expunge.cli.app import app
from expunge.cli.terminal import output


@app.command()
def methods() -> None:
    """List the methods that can forget."""
    from expunge.unlearning import registry

    for name, known in sorted(registry.methods().items()):
        output().print(f"[bold]{name:28}[/] {known.summary}")
