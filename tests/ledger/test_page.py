"""The page in a real Chromium: file a request, watch the work, download, check; at two widths, light and dark.

Pictures go to the folder that EXPUNGE_SHOTS names, for somebody to look at.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from expunge.ledger import desk
from expunge.ledger.receipt import verify
from ledger.browser import MISSING, chromium, installed
from ledger.places import UNSEEN, Place
from ledger.serving import serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not installed(), reason=MISSING)]
NAME = "<img src=x onerror=alert(1)> & \N{DOG FACE} 'bob'"
EXPUNGE = [sys.executable, "-c", "from expunge.cli import main; main()"]


@pytest.fixture
def place(tmp_path):
    own = Place(tmp_path / "place", UNSEEN)
    text = own.file.read_text().replace('"bob"', repr(NAME)).replace("rounds=2", "rounds=40")
    own.file.write_text(text)
    own.federation.train()
    return own


def expunge(place, *words):
    done = subprocess.run([*EXPUNGE, *words], cwd=place.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextmanager
def watching(place):
    """`expunge request run --watch` beside the page."""
    words = ["request", "run", "--watch", "--method", "retrain", "--retrains", "3"]
    process = subprocess.Popen([*EXPUNGE, *words], cwd=place.folder, stderr=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


class Page:
    """What a person does with the page."""

    def __init__(self, driver):
        from selenium.webdriver.common.by import By

        self.driver, self.by = driver, By

    def one(self, css):
        return self.driver.find_element(self.by.CSS_SELECTOR, css)

    def text(self, css):
        return self.one(css).text

    def until(self, holds, seconds=90):
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.05)
        return found

    def fill(self, form, **values):
        for name, value in values.items():
            field = self.one(f"#{form} [name={name}]")
            self.driver.execute_script("arguments[0].value = arguments[1]", field, value)  # emojis, too
        self.one(f"#{form} button").click()

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def shot(self, name):
        """The whole page as a picture; nothing may stick out at the side."""
        width = self.driver.execute_script("return innerWidth")
        assert self.driver.execute_script("return document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("EXPUNGE_SHOTS"):
            height = self.driver.execute_script("return document.documentElement.scrollHeight")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def arrived(folder, name):
    """A file that is being downloaded, once it is there."""
    end = time.monotonic() + 30
    while not (folder / name).exists():
        assert time.monotonic() < end, list(folder.iterdir())
        time.sleep(0.1)
    return folder / name


def test_from_filing_to_a_receipt_that_is_checked(place, tmp_path):
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    with serving(place.folder) as server, watching(place), chromium(downloads=downloads) as driver:
        page = Page(driver)
        driver.get(server.page)
        page.until(lambda: page.one("#room").is_displayed())
        assert "token" not in driver.current_url
        page.one("#new summary").click()
        page.fill("file", client=NAME, note="by post")
        page.until(lambda: "R-0001: received" in page.text("#one-title"))
        assert NAME in page.text("#requests")
        page.fill("accept", checked_by="A. Clerk")
        page.until(lambda: page.one("#working").is_displayed())
        assert "R-0001" in page.text("#working")
        page.until(lambda: "audited:" in page.text("#timeline"))
        page.shot("page-audited-1280-light")
        page.until(lambda: not page.one("#working").is_displayed())
    with serving(place.folder) as server, chromium(downloads=downloads) as driver:
        page = Page(driver)
        expunge(place, "request", "run", "R-0001", "--override", "a test goes on")
        expunge(place, "request", "close", "R-0001", "--told-all")
        driver.get(server.page)
        page.until(lambda: page.driver.find_elements(page.by.CSS_SELECTOR, "#requests tbody button"))
        page.until(lambda: page.one("#requests tbody button")).click()
        page.until(lambda: page.one("#papers").is_displayed())
        page.one("#check-own").click()
        page.until(lambda: "The receipt is valid." in page.text("#own-checked"))
        page.one("#receipt").click()
        page.one("#certificate").click()
        receipt, certificate = (arrived(downloads, f"R-0001.{end}") for end in ("intoto.jsonl", "html"))
        folder = place.folder / "ledger"
        verify(receipt, folder / "key.pub", folder / "log.jsonl")
        page.one("#check summary").click()
        page.one("#verify [name=receipt]").send_keys(str(receipt))
        page.one("#verify button").click()
        page.until(lambda: "The receipt is valid." in page.text("#checked"))
        receipt.write_bytes(receipt.read_bytes().replace(b"payload", b"payl0ad", 1))
        page.one("#verify [name=receipt]").send_keys(str(receipt))
        page.one("#verify button").click()
        page.until(lambda: "NOT valid" in page.text("#checked"))
        page.one("#gone summary").click()
        assert NAME in page.text("#tombstones")
        assert page.complaints() == []
        assert "&lt;img" in certificate.read_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_has_its_colours(done, width, dark):
    desk.add(done.ledger, desk.Filing(("x" * 10_000,)))
    desk.add(done.ledger, desk.Filing(("ada",), received="2026-10-20"))
    with serving(done.folder) as server, chromium(width, dark=dark) as driver:
        page = Page(driver)
        driver.get(server.page)
        page.until(lambda: len(driver.find_elements(page.by.CSS_SELECTOR, "#requests tbody tr")) == 3)
        driver.find_elements(page.by.CSS_SELECTOR, "#requests tbody button")[-1].click()
        page.until(lambda: page.one("#papers").is_displayed())
        page.one("#new summary").click()
        page.shot(f"page-{width}-{'dark' if dark else 'light'}")
        paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) < 200) is dark
        assert page.complaints() == []
        certificate = done.folder / "ledger" / "receipts" / "R-0001.html"
        certificate.write_bytes(server.ask("/api/requests/R-0001/certificate")[1])
        driver.get(certificate.as_uri())
        page.shot(f"certificate-{width}-{'dark' if dark else 'light'}")


def test_a_certificate_prints_on_one_page(done):
    import base64

    expunge(done, "request", "close", "R-0001")
    with chromium() as driver:
        driver.get((done.folder / "ledger" / "receipts" / "R-0001.html").as_uri())
        printed = driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(printed["data"]).count(b"/Type /Page\n") == 1


def test_without_the_token_there_is_a_door_and_nothing_else(done):
    with serving(done.folder) as server, chromium() as driver:
        page = Page(driver)
        driver.get(f"http://127.0.0.1:{server.port}/")
        page.until(lambda: page.one("#door").is_displayed())
        assert "bob" not in driver.page_source
        page.fill("enter", token="not the token")
        page.until(lambda: page.one("#door").is_displayed())
        assert "R-0001" not in driver.page_source
        page.fill("enter", token=server.page.partition("=")[2])
        page.until(lambda: page.one("#room").is_displayed())
        assert "R-0001" in page.text("#requests")
