import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from expunge.data.download import download, fetch
from expunge.data.sources import Source
from expunge.errors import DataError

FILES = {"a.bin": b"first file", "b.bin": b"second file" * 100_000}


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


CHECKSUMS = {name: sha256(blob) for name, blob in FILES.items()}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def offered(tmp_path: Path) -> Path:
    folder = tmp_path / "offered"
    folder.mkdir()
    for name, blob in FILES.items():
        (folder / name).write_bytes(blob)
    return folder


@pytest.fixture
def server(offered: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = partial(QuietHandler, directory=str(offered))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


def pack(path: Path, folder: str, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, blob in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(blob)
            tar.addfile(member, io.BytesIO(blob))
    return sha256(path.read_bytes())


def listing(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_files_come_over_http(server: str, tmp_path: Path) -> None:
    fetch(Source("Toy/raw", CHECKSUMS, url=server), tmp_path / "data")
    assert listing(tmp_path / "data") == ["Toy/raw/a.bin", "Toy/raw/b.bin"]
    assert (tmp_path / "data/Toy/raw/b.bin").read_bytes() == FILES["b.bin"]


def test_only_missing_and_damaged_files_are_fetched(offered: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "Toy"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(FILES["a.bin"])
    (folder / "b.bin").write_bytes(b"damaged")
    (offered / "a.bin").unlink()
    fetch(Source("Toy", CHECKSUMS, url=offered.as_uri() + "/"), tmp_path / "data")
    assert (folder / "b.bin").read_bytes() == FILES["b.bin"]


def test_wrong_checksum_leaves_nothing_behind(offered: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.bin .* came damaged"):
        download((offered / "a.bin").as_uri(), tmp_path / "new" / "a.bin", sha256(b"another"))
    assert listing(tmp_path / "new") == []


def test_wrong_checksum_leaves_the_old_file(offered: Path, tmp_path: Path) -> None:
    old = tmp_path / "a.bin"
    old.write_bytes(b"old")
    with pytest.raises(DataError):
        download((offered / "a.bin").as_uri(), old, sha256(b"another"))
    assert old.read_bytes() == b"old"


def test_absent_on_the_server(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not be downloaded"):
        download(server + "missing", tmp_path / "missing", sha256(b""))


def test_offline_is_one_sentence(tmp_path: Path) -> None:
    # Port 9 of the loopback refuses, as every server does when there is no network.
    with pytest.raises(DataError, match="go online, or set EXPUNGE_DATA") as caught:
        fetch(Source("Toy", CHECKSUMS, url="http://127.0.0.1:9/"), tmp_path)
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == []


def test_archive_is_unpacked_and_removed(tmp_path: Path) -> None:
    checksum = pack(tmp_path / "toy.tar.gz", "Toy", FILES | {"readme.html": b"not wanted"})
    url = (tmp_path / "toy.tar.gz").as_uri()
    fetch(Source("Toy", CHECKSUMS, url, archive=checksum), tmp_path / "data")
    assert listing(tmp_path / "data") == ["Toy/a.bin", "Toy/b.bin"]


def test_archive_with_a_changed_file_is_refused(tmp_path: Path) -> None:
    checksum = pack(tmp_path / "toy.tar.gz", "Toy", FILES | {"b.bin": b"changed"})
    url = (tmp_path / "toy.tar.gz").as_uri()
    with pytest.raises(DataError, match=r"b\.bin from toy\.tar\.gz came damaged"):
        fetch(Source("Toy", CHECKSUMS, url, archive=checksum), tmp_path / "data")
    assert listing(tmp_path / "data") == ["Toy/a.bin"]


@pytest.mark.parametrize("blob", [b"", b"no archive"])
def test_what_is_no_archive_cannot_be_unpacked(blob: bytes, tmp_path: Path) -> None:
    (tmp_path / "toy.tar.gz").write_bytes(blob)
    source = Source("Toy", CHECKSUMS, (tmp_path / "toy.tar.gz").as_uri(), archive=sha256(blob))
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(source, tmp_path / "data")


def test_archive_without_the_file_cannot_be_unpacked(tmp_path: Path) -> None:
    checksum = pack(tmp_path / "toy.tar.gz", "Toy", {"a.bin": FILES["a.bin"]})
    source = Source("Toy", CHECKSUMS, (tmp_path / "toy.tar.gz").as_uri(), archive=checksum)
    with pytest.raises(DataError, match="cannot be unpacked"):
        fetch(source, tmp_path / "data")


@pytest.mark.parametrize("archive", [None, "0" * 64])
def test_a_data_folder_that_is_a_file_is_a_data_error(archive: str | None, offered: Path) -> None:
    url = (offered / "a.bin").as_uri() if archive else offered.as_uri() + "/"
    with pytest.raises(DataError):
        fetch(Source("Toy", CHECKSUMS, url, archive), offered / "b.bin")
