"""A forget under fire, on a real deployment: the undisturbed result, or a clear error and an untouched model.

Never a hang: every run has a deadline. Never a silently smaller problem: results are compared bit for bit with those of
the local engine on all the sites that stay.

    python -m pytest -s tests/faults          half an hour: a site that was killed is let in again after a minute
"""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from expunge.federation.keeping.state_store import StateStore
from faults.faults import WAYS, Kill, Killer, random_kills, wait_for_rounds
from flower.hospitals import APP, EXAMPLES, LEAVER, Hospitals, left_behind, weights_in
from flower_deployment.deployment import Deployment

SEED = 5
LIMIT = 1800.0
"""Seconds that one run may take, killed sites and all."""

PHASED, KRYLOV = "retrace+recovery", "retrace-krylov"
"""Two requests: few rounds, each of another kind (curvature, losses, training, losses); and many alike."""

ROUNDS = {PHASED: 4, KRYLOV: 12}


@pytest.fixture(scope="module")
def hospitals():
    return Hospitals(4)


@pytest.fixture(scope="module")
def deployment(hospitals, tmp_path_factory):
    """All sites are registered; the leaver is switched off before anything begins."""
    with Deployment(tmp_path_factory.mktemp("faults") / "deployment", hospitals.configs) as running:
        running.switch_off(LEAVER)
        yield running
    assert not left_behind(running.folder)


@pytest.fixture
def store(hospitals, tmp_path, deployment):
    """A store of its own for each test, and every site back online."""
    deployment.wait_online(deployment.sites)
    return hospitals.store(tmp_path / "store")


def forget(deployment, store, method, **settings):
    config = {"forget": LEAVER, "method": method, "store": str(store), "deadline": 400.0, **settings}
    return deployment.run(APP, config, deadline=LIMIT)


def require_undisturbed(run, store, hospitals, method):
    assert run.completed, run.log
    book = StateStore(store).book
    assert book.forgotten[-1]["cost"]["rounds"] == ROUNDS[method]
    assert book.pending is None
    assert torch.equal(weights_in(store), hospitals.forgotten(method))


@pytest.mark.parametrize("method", [PHASED, KRYLOV])
def test_undisturbed_it_is_the_local_result(deployment, hospitals, store, method):
    require_undisturbed(forget(deployment, store, method), store, hospitals, method)


@pytest.mark.parametrize(
    ("method", "kills"),
    [
        (PHASED, [Kill("hospital-1", WAYS[0], after, 2.0) for after in range(-1, ROUNDS[PHASED])]),
        (PHASED, [Kill("hospital-4", WAYS[1], after, 0.5) for after in range(-1, ROUNDS[PHASED])]),
        (KRYLOV, random_kills(10, ROUNDS[KRYLOV], ["hospital-1", "hospital-3", "hospital-4"], SEED)),
        (PHASED, [Kill("hospital-3", WAYS[2], after, 1.5) for after in (0, 2)]),
    ],
    ids=["at each phase", "SuperNode at each phase", "at random moments", "only the ClientApp"],
)
def test_killed_sites_come_back_and_the_result_is_the_undisturbed_one(deployment, hospitals, store, method, kills):
    with Killer(deployment, store, kills) as killer:
        run = forget(deployment, store, method)
    print(f"    {len(killer.done)} kills, {run.seconds:.0f} s")
    require_undisturbed(run, store, hospitals, method)
    assert killer.done == kills


def test_a_site_that_stays_away_ends_in_a_clear_error_and_resume_finishes_once_it_is_back(deployment, hospitals, store):
    number = deployment.submit(APP, {"forget": LEAVER, "method": PHASED, "store": str(store), "deadline": 60.0})
    wait_for_rounds(store, 1, LIMIT)
    deployment.switch_off("hospital-4")
    run = deployment.follow(number, deadline=LIMIT)
    assert run.status == "finished:failed"
    assert "No answer from 'hospital-4' within 60 s" in " ".join(run.log.split())
    assert torch.equal(weights_in(store), hospitals.trained)
    deployment.switch_on("hospital-4")
    deployment.wait_online(deployment.sites)
    resumed = forget(deployment, store, PHASED, forget="", resume=True)
    require_undisturbed(resumed, store, hospitals, PHASED)


@pytest.mark.parametrize(("method", "rounds"), [(PHASED, 1), (KRYLOV, 5)])
def test_superlink_and_serverapp_die_and_resume_gives_the_undisturbed_result(
    deployment, hospitals, store, method, rounds
):
    deployment.submit(APP, {"forget": LEAVER, "method": method, "store": str(store), "deadline": 400.0})
    wait_for_rounds(store, rounds, LIMIT)
    deployment.kill_superlink()
    assert torch.equal(weights_in(store), hospitals.trained)
    assert StateStore(store).book.pending is not None
    deployment.start_superlink()
    deployment.wait_online(deployment.sites)
    resumed = forget(deployment, store, method, forget="", resume=True)
    require_undisturbed(resumed, store, hospitals, method)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("seconds", [0.0, 25.0])
def test_the_example_stops_all_that_it_started(tmp_path, number, seconds):
    """Stopped as soon as it has started something, and later."""
    script = [sys.executable, EXAMPLES / "flower-deployment" / "deploy.py", "--out", tmp_path / "out"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(script, env=environment, text=True, stderr=subprocess.PIPE)
    try:
        began = time.monotonic()
        while len(left_behind(tmp_path)) < 2:  # the script itself, and more
            assert time.monotonic() - began < 120
            time.sleep(0.2)
        time.sleep(seconds)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=60)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 1
    assert complaint.startswith("stopped")
    assert not left_behind(tmp_path)
    assert not list(tmp_path.glob("expunge-flower-*")), "private keys are deleted, too"
