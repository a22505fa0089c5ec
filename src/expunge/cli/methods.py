"""`expunge methods`."""

from __future__ import annotations

from expunge.cli.app import app, examples
from expunge.cli.terminal import output

_KEPT = {"updates": " Needs `train --keep-updates`.", "shards": " Needs sharded training, as in `expunge bench`."}


@app.command(epilog=examples("expunge forget runs/mine --client client-3 --method fine-tuning"))
def methods() -> None:
    """List the methods that can forget, for --method."""
    from rich.table import Table

    from expunge.unlearning.registry import RECOVERY
    from expunge.unlearning.registry import methods as registered

    known = dict(sorted(registered().items()))
    with_recovery = [name for name in known if name.removesuffix(RECOVERY) in known and name.endswith(RECOVERY)]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, method in known.items():
        if name not in with_recovery:
            summary = method.summary[0].upper() + method.summary[1:].rstrip(".")
            table.add_row(name, f"{summary}.{_KEPT.get(method.needs or '', '')}")
    output().print(table)
    output().print(
        f"\nFollowed by a recovery round of the clients that stay: {', '.join(with_recovery)}.", highlight=False
    )
