import hashlib
import http.server
import socket
import tarfile
from pathlib import Path

import pytest
from data_files import pack, served, write_binary_edition

from lit_cifar.data import download
from lit_cifar.data.download import CIFAR10_BINARY, Archive, install, put_in_place, staging
from lit_cifar.errors import DataError

FOLDER = "cifar-10-batches-bin"
UNREACHABLE = "http://127.0.0.1:9/small.tar.gz"  # the discard port, where nothing listens


@pytest.fixture
def archive_file(tmp_path):
    """A small archive in a folder of its own."""
    site = tmp_path / "site"
    site.mkdir()
    return pack(write_binary_edition(tmp_path / "original", records_per_file=10), site / "small.tar.gz")


def describe(archive_file: Path, *, url: str = UNREACHABLE, md5: str | None = None) -> Archive:
    return Archive(url=url, md5=md5 or hashlib.md5(archive_file.read_bytes()).hexdigest(), folder=FOLDER)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(archive: Archive, root: Path, *, allowed: bool = True) -> str:
    with pytest.raises(DataError) as caught:
        install(archive, root, download=allowed)
    message = str(caught.value)
    assert len(message.splitlines()) <= 5
    return message


def assert_names_remedies(message: str, *, tried: bool = True) -> None:
    """To allow the download helps nobody whose download has failed."""
    for remedy in ("--data.root=", "by hand", "--data.dataset=synthetic"):
        assert remedy in message
    assert ("--data.download=true" in message) != tried


def test_downloads_checks_and_unpacks(archive_file, tmp_path, capsys):
    root = tmp_path / "not" / "there" / "yet"
    with served(archive_file.parent) as address:
        install(describe(archive_file, url=f"{address}/small.tar.gz"), root, download=True)
    assert contents(root / FOLDER) == contents(tmp_path / "original" / FOLDER)
    assert [path.name for path in root.iterdir()] == [FOLDER]
    assert "Downloading small.tar.gz" in capsys.readouterr().err


@pytest.mark.parametrize("allowed", [True, False])
def test_an_archive_that_lies_in_root_is_used_and_kept(archive_file, tmp_path, allowed):
    root = archive_file.parent
    install(describe(archive_file), root, download=allowed)
    assert contents(root / FOLDER) == contents(tmp_path / "original" / FOLDER)
    assert sorted(path.name for path in root.iterdir()) == [FOLDER, "small.tar.gz"]


def test_an_archive_in_root_with_a_wrong_hash_is_refused_and_kept(archive_file):
    archive = describe(archive_file)
    archive_file.write_bytes(archive_file.read_bytes()[:-100])
    message = refusal(archive, archive_file.parent)
    assert str(archive_file) in message
    assert archive.md5 in message
    assert [path.name for path in archive_file.parent.iterdir()] == ["small.tar.gz"]


def test_a_download_with_a_wrong_hash_leaves_nothing(archive_file, tmp_path):
    root = tmp_path / "root"
    with served(archive_file.parent) as address:
        archive = describe(archive_file, url=f"{address}/small.tar.gz", md5="0" * 32)
        message = refusal(archive, root)
    assert "0" * 32 in message
    assert_names_remedies(message)
    assert list(root.iterdir()) == []


def test_a_download_cut_short_leaves_nothing(archive_file, tmp_path, monkeypatch):
    def send_half(self: http.server.SimpleHTTPRequestHandler) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(archive_file.stat().st_size))
        self.end_headers()
        self.wfile.write(archive_file.read_bytes()[:500])

    root = tmp_path / "root"
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "do_GET", send_half)
    with served(archive_file.parent) as address:
        message = refusal(describe(archive_file, url=f"{address}/small.tar.gz"), root)
    assert_names_remedies(message)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_unpacking_leaves_nothing(archive_file, tmp_path, monkeypatch, failure):
    def extract_one(self: tarfile.TarFile, path: Path, **kwargs: object) -> None:
        for member in self.getmembers()[:2]:
            self.extract(member, path, **kwargs)
        raise failure

    monkeypatch.setattr(tarfile.TarFile, "extractall", extract_one)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else DataError
    with pytest.raises(expected):
        install(describe(archive_file), archive_file.parent, download=False)
    assert [path.name for path in archive_file.parent.iterdir()] == ["small.tar.gz"]


def test_no_network(archive_file, tmp_path):
    message = refusal(describe(archive_file), tmp_path / "root")
    assert UNREACHABLE in message
    assert "refused" in message
    assert_names_remedies(message)


def test_no_such_page(archive_file, tmp_path):
    with served(archive_file.parent) as address:
        message = refusal(describe(archive_file, url=f"{address}/other.tar.gz"), tmp_path / "root")
    assert "404" in message


def test_a_silent_server_is_given_up(archive_file, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/small.tar.gz"
        assert "timed out" in refusal(describe(archive_file, url=url), tmp_path / "root")


def test_without_permission_to_download_nothing_is_made(archive_file, tmp_path):
    root = tmp_path / "root"
    message = refusal(describe(archive_file), root, allowed=False)
    assert "--data.download=false" in message
    assert_names_remedies(message, tried=False)
    assert not root.exists()


def test_root_that_cannot_be_written_to(archive_file, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"--data.root={root} cannot be written to" in refusal(describe(archive_file), root)


def test_an_archive_cannot_write_outside(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "payload").write_text("evil")
    with tarfile.open(site / "small.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "payload", "../../evil")
    refusal(describe(site / "small.tar.gz"), site, allowed=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["payload", "site", "small.tar.gz"]


def test_an_archive_of_something_else(tmp_path):
    site = tmp_path / "site"
    (tmp_path / "other").mkdir()
    site.mkdir()
    pack(tmp_path / "other", site / "small.tar.gz")
    assert f"no folder {FOLDER}" in refusal(describe(site / "small.tar.gz"), site, allowed=False)


def test_what_is_no_archive(tmp_path):
    (tmp_path / "small.tar.gz").write_bytes(b"not an archive")
    assert "cannot be unpacked" in refusal(describe(tmp_path / "small.tar.gz"), tmp_path, allowed=False)


def test_of_two_processes_that_finish_the_first_one_stays(tmp_path):
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    put_in_place(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"
    (tmp_path / "occupied").write_text("")
    with pytest.raises(DataError, match="occupied cannot be made"):
        put_in_place(tmp_path / "mine", tmp_path / "occupied")


def test_staging_is_hidden_and_removed(tmp_path):
    with staging(tmp_path) as scratch:
        assert scratch.parent == tmp_path
        assert scratch.name.startswith(".")
        (scratch / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_the_official_archive_is_the_one_published():
    assert CIFAR10_BINARY.url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert CIFAR10_BINARY.md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert CIFAR10_BINARY.file_name == "cifar-10-binary.tar.gz"
