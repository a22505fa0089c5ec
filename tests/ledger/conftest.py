import pytest

from ledger.places import QUICK, Place


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("ledger") / "trained")


@pytest.fixture
def place(trained, tmp_path):
    return trained.copy(tmp_path / "place")


@pytest.fixture(scope="session")
def finished(trained, tmp_path_factory):
    """With a request that is closed; to be looked at only."""
    own = trained.copy(tmp_path_factory.mktemp("ledger") / "finished")
    number = own.ask("bob")
    assert own.work(QUICK).run([number]) == []
    own.close(number)
    return own


@pytest.fixture
def done(finished, tmp_path):
    return finished.copy(tmp_path / "done")
