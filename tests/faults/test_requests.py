"""A request on a real deployment: a site is killed in between; the departed one comes back under two names."""

import pytest

from expunge.federation.keeping.state_store import StateStore
from expunge.ledger import desk
from expunge.ledger.certificate import write_certificate
from expunge.ledger.ledger import Ledger
from expunge.ledger.receipt import verify
from faults.faults import wait_for_rounds
from flower.hospitals import APP, LEAVER, left_behind
from flower.test_requests import FILE
from flower_app.task import Net
from flower_deployment.deployment import Deployment

LIMIT = 600.0
SITES = {
    f"hospital-{number + 1}": {"name": f"hospital-{number + 1}", "partition-id": number, "num-partitions": 4}
    for number in range(4)
}
OTHER = "hospital-9"


@pytest.fixture
def place(tmp_path):
    (tmp_path / "federation.py").write_text(FILE)
    Ledger.create(tmp_path / "ledger", "the desk")
    return tmp_path


def test_request_forget_receipt_certificate_and_the_site_comes_back(place):
    ledger, store = Ledger(place / "ledger", "the desk"), place / "store"
    training = {"num-server-rounds": 8, "store": str(store)}
    with Deployment(place / "deployment", SITES) as deployment:
        run = deployment.run(APP, training, deadline=LIMIT)
        assert run.completed, run.log
        assert set(StateStore(store).book.keys) == set(SITES)
        number = desk.add(ledger, desk.Filing((LEAVER,), checked_by="the clerk"))
        deployment.switch_off(LEAVER)
        config = {"requests": str(place / "federation.py"), "store": str(store), "deadline": 300.0}
        submitted = deployment.submit(APP, config)
        wait_for_rounds(store, 1, LIMIT)
        deployment.sites["hospital-3"].kill()
        run = deployment.follow(submitted, deadline=LIMIT)
        assert run.completed, run.log
        case = ledger.case(number)
        print(f"    forgotten in {run.seconds:.0f} s, {case.facts['audited']['word']}")
        assert case.erased, case.facts.get("audited")
        desk.tell(ledger, number, ())
        desk.close(ledger, number)
        write_certificate(ledger, number)
        folder = ledger.folder
        found = verify(folder / "receipts" / f"{number}.intoto.jsonl", folder / "key.pub", folder / "log.jsonl")
        assert found.content["work"]["answered"]["count"] == 3
        assert (folder / "receipts" / f"{number}.html").exists()
        deployment._configs[OTHER] = {**SITES[LEAVER], "name": OTHER}
        for name in (LEAVER, OTHER):
            returned = deployment.start_site(name, deployment._keys[LEAVER].private)
            try:
                deployment.wait_online(SITES)
                run = deployment.run(APP, {**training, "num-server-rounds": 1}, deadline=LIMIT)
            finally:
                returned.stop()
            assert run.completed, run.log
            assert f"has the key of site '{LEAVER}', which has left" in " ".join(run.log.split())
            assert set(StateStore(store).load(Net()).memory.clients) == set(SITES) - {LEAVER}
    assert not left_behind(deployment.folder)
