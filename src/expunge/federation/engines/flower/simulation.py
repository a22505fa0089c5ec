"""Work on a Flower federation that is simulated on this machine: the real messages and handlers, without a network."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from expunge.federation.engines.flower.app import unlearnable
from expunge.federation.engines.flower.engine import FlowerEngine
from expunge.federation.engines.flower.site import Site

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Flower and ray call home unless told not to."""

T = TypeVar("T")


def simulated(site: Callable[[int], Site], count: int, work: Callable[[FlowerEngine], T]) -> T:
    """Do some work with an engine on simulated sites; what it raises is raised here.

    Args:
        site: makes the site of a number, from 0; it is called in other processes, for every message.
        count: how many sites.
        work: what to do; it runs beside the simulation, in a thread.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from flwr.simulation import run_simulation  # it starts ray's threads

    server, done = ServerApp(), list[T]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        done.append(work(FlowerEngine(grid, poll=0.05)))

    client = unlearnable(ClientApp(), lambda context: site(int(str(context.node_config["partition-id"]))))
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        run_simulation(server, client, count, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
    finally:
        log.setLevel(level)
    return done[0]
