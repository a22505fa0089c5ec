"""One small deployment on loopback, with TLS and SuperNode authentication: everything real."""

import runpy
import shutil
import sys
import time

import pytest

from expunge.errors import RequestError
from flower.hospitals import APP, EXAMPLES, LEAVER, Hospitals, left_behind, relative_difference, weights_in
from flower_deployment import deployment as deployments
from flower_deployment.deployment import Deployment
from flower_deployment.keys import make_site_keys
from flower_deployment.processes import RETRY


@pytest.mark.slow
def test_forgets_a_site_that_is_away_as_the_local_engine_does_and_refuses_unregistered_ones(tmp_path):
    hospitals = Hospitals(3)
    store = hospitals.store(tmp_path / "store")
    stay = {name: config for name, config in hospitals.configs.items() if name != LEAVER}
    with Deployment(tmp_path / "deployment", stay) as deployment:
        unknown_key = make_site_keys(tmp_path / "stranger").private
        strangers = {name: deployment.start_site(name, key) for name, key in [("odd", unknown_key), ("keyless", None)]}
        run = deployment.run(APP, {"forget": LEAVER, "store": str(store), "deadline": 120.0}, deadline=900.0)
        still_there = [name for name, program in strangers.items() if program.running]
        for program in strangers.values():
            program.stop()
        assert deployment.online() == set(stay)
        assert left_behind(deployment.folder), "the processes of a deployment are to be seen"
    assert run.completed, run.log
    expected = hospitals.forgotten("retrace") - hospitals.trained
    assert relative_difference(weights_in(store) - hospitals.trained, expected) < 1e-5
    assert not still_there
    assert "Failed to activate SuperNode" in deployment.log_of("odd").read_text()
    assert "Failed to initialize the connection" in deployment.log_of("keyless").read_text()
    assert not left_behind(deployment.folder)
    time.sleep(RETRY + 1.0)
    assert not left_behind(deployment.folder), "a supervisor goes on after the end"


def test_a_folder_with_an_earlier_deployment_is_refused(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "superlink.db").touch()
    with pytest.raises(RequestError, match="earlier deployment"):
        Deployment(tmp_path, {})


def test_a_command_of_flowers_that_hangs_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(deployments, "COMMAND_LIMIT", 0.01)
    with pytest.raises(
        RequestError, match=r"`flwr list loopback --run-id 1` did not end within 0.01 s: read the logs in"
    ):
        Deployment(tmp_path, {}).status(1)


@pytest.mark.parametrize(("problem", "shown"), [(RequestError("no luck"), SystemExit), (OSError("no disk"), OSError)])
def test_the_demonstration_keeps_its_logs_when_it_fails(tmp_path, monkeypatch, capsys, problem, shown):
    script = runpy.run_path(str(EXAMPLES / "flower-deployment" / "deploy.py"))

    def demonstrate(folder, console):
        raise problem

    monkeypatch.setitem(script["main"].__globals__, "demonstrate", demonstrate)
    monkeypatch.setattr(script["tempfile"], "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(script["signal"], "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["deploy.py"])
    with pytest.raises(shown, match="no"):
        script["main"]()
    assert tmp_path.exists()


def test_what_was_started_is_stopped_when_the_start_fails(tmp_path):
    """SuperLink is up and there is nothing to register: Flower's complaint comes through, and nothing is left."""
    deployment = Deployment(tmp_path / "deployment", {"ada": {"name": "ada"}})
    shutil.rmtree(deployment.folder / "sites" / "ada")
    with pytest.raises(RequestError, match=r"supernode register.*does not exist"), deployment:
        pass
    assert not left_behind(deployment.folder)
