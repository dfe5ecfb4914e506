"""Archives fetched from a real server on this machine, which also does all that servers do wrong."""

import hashlib
import io
import os
import shutil
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from metaaugment.lab.data import DATASETS, cifar, dataset, download, get, omniglot, unpack
from metaaugment.lab.data.entry import Archive

from trees import use_cifar, write_cifar10, write_omniglot


@dataclass
class Site:
    """What a server gives, and how: with parts or not, up to some byte, slowly, with a status other than success."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    length: bool = True
    breaks_at: int | None = None
    stalls: threading.Event | None = None
    status: int | None = None
    shift: int = 0
    asked: list[str | None] = field(default_factory=list)


def handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append(wanted)
            content = site.files.get(self.path.rpartition("/")[2])
            if site.status is not None or content is None:
                self.send_error(site.status or 404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                told = start + site.shift
                self.send_header("Content-Range", f"bytes {told}-{len(content) - 1}/{len(content)}")
            if site.length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : site.breaks_at])
            self.wfile.flush()
            if site.stalls is not None:
                site.stalls.wait(10)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    site = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/files"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        if site.stalls is not None:
            site.stalls.set()
        server.shutdown()
        thread.join()


def tar_of(folder: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.add(folder, folder.name)
    return stream.getvalue()


def zip_of(folder: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file in sorted(folder.rglob("*")):
            zipped.write(file, file.relative_to(folder.parent))
    return stream.getvalue()


def offer(site: Site, name: str, content: bytes, unpacks_to: str) -> Archive:
    site.files[name] = content
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return Archive(f"{site.url}/{name}", md5, unpacks_to, max_bytes=1_000_000)


@pytest.fixture
def archive(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """A small CIFAR-10 on the server."""
    use_cifar(monkeypatch, "cifar10", write_cifar10(tmp_path / "made"))
    content = tar_of(tmp_path / "made" / "cifar-10-batches-bin")
    return offer(site, "cifar-10-binary.tar.gz", content, "cifar-10-batches-bin")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data" / "folder"


FILE = "cifar-10-binary.tar.gz"
PART = f"{FILE}.part"


def test_official_addresses() -> None:
    """As their authors and others publish them."""
    known = {
        "cifar10": ["c32a1d4ab5d03f1284b67883e8d87530"],
        "cifar100": ["03b5dce01913d631647c71ecec9e9cb8"],
        "omniglot": ["68d2efa1b9178cc56df9314c21c6e718", "6b91aef0f799c5bb55b94e3f2daec811"],
    }
    for name, sums in known.items():
        assert [archive.md5 for archive in DATASETS[name].archives] == sums
        assert all(archive.url.startswith("https://") for archive in DATASETS[name].archives)


def test_each_cifar_is_fetched_to_where_it_is_read_from(tmp_path: Path) -> None:
    for name, layout in {"cifar10": cifar.CIFAR10, "cifar100": cifar.CIFAR100}.items():
        (archive,) = DATASETS[name].archives
        assert archive.unpacks_to == layout.binary
        with pytest.raises(ValueError, match=f"^{layout.title} is not there: .*; get it: metaaugment data get {name} "):
            dataset(name, tmp_path)


def test_get_then_read(site: Site, archive: Archive, root: Path, tmp_path: Path) -> None:
    told = []
    sentence = get("cifar10", root, lambda *what: told.append(what), [archive])
    assert sentence == f"CIFAR-10 is complete: {root / 'cifar-10-batches-bin'}"
    assert os.listdir(root) == ["cifar-10-batches-bin"]
    assert dataset("cifar10", root).fingerprint() == dataset("cifar10", tmp_path / "made").fingerprint()
    size = len(site.files[FILE])
    assert ("fetching cifar-10-binary.tar.gz", size, size) in told
    assert told[-1] == ("unpacking cifar-10-binary.tar.gz", 6 * 61_460, None)


def test_what_is_there_is_not_fetched_again(site: Site, archive: Archive, root: Path) -> None:
    get("cifar10", root, archives=[archive])
    assert get("cifar10", root, archives=[archive]).startswith("CIFAR-10 is there already: ")
    assert len(site.asked) == 1


def test_omniglot_is_two_archives(site: Site, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omniglot, "OMNIGLOT", write_omniglot(tmp_path / "made"))
    made = tmp_path / "made" / "omniglot"
    archives = [
        offer(site, f"{part}.zip", zip_of(made / part), f"omniglot/{part}")
        for part in ("images_background", "images_evaluation")
    ]
    get("omniglot", root, archives=archives)
    assert sorted(os.listdir(root / "omniglot")) == ["images_background", "images_evaluation"]
    assert dataset("omniglot", root).fingerprint() == dataset("omniglot", tmp_path / "made").fingerprint()
    # One that is missing is fetched alone.
    shutil.rmtree(root / "omniglot" / "images_evaluation")
    site.asked.clear()
    get("omniglot", root, archives=archives)
    assert len(site.asked) == 1


def test_interrupted_download_goes_on(site: Site, archive: Archive, root: Path) -> None:
    site.breaks_at = 5_000
    with pytest.raises(OSError, match=r"broke off at 5,000 of [\d,]+ bytes; run the same command again to continue"):
        get("cifar10", root, archives=[archive])
    assert os.listdir(root) == [PART]
    site.breaks_at = None
    get("cifar10", root, archives=[archive])
    assert site.asked == [None, "bytes=5000-"]


def test_server_without_parts_or_length(site: Site, archive: Archive, root: Path) -> None:
    root.mkdir(parents=True)
    (root / PART).write_bytes(b"x" * 5_000)
    site.ranges = site.length = False
    assert get("cifar10", root, archives=[archive]).startswith("CIFAR-10 is complete")
    assert site.asked == ["bytes=5000-"]


def test_whole_part_needs_no_server(site: Site, archive: Archive, root: Path) -> None:
    root.mkdir(parents=True)
    (root / PART).write_bytes(site.files[FILE])
    get("cifar10", root, archives=[archive])
    assert site.asked == []


# What a server or a disk does wrong, what is in the folder already, and what is said; nothing is left behind.
FAULTS: dict[str, tuple[dict[str, Any], bytes | None, str]] = {
    "forbidden": ({"status": 403}, None, r"binary\.tar\.gz: the server answers 403 .*; try again later"),
    "not found": ({"status": 404}, None, r"binary\.tar\.gz: the server answers 404 .*; try again later"),
    "busy": ({"status": 503}, None, r"binary\.tar\.gz: the server answers 503 .*; try again later"),
    "another part": ({"shift": 7}, b"x" * 5_000, r"not send the part of .*\.part that was asked for; it is removed"),
    "another whole": ({}, b"", r"part was as long as the archive, but not the same; it is removed, try"),
    "another file": ({"files": {FILE: b"something else"}}, None, r"MD5 6c7ba9c5\w+97c74 where \w+ .* removed, try"),
    "no end": ({"max_bytes": 100}, None, "is longer than 100 bytes, so it is not the archive; it is removed"),
    "no network": (
        {"url": f"http://127.0.0.1:9/{FILE}"}, None, r"no connection to 127\.0\.0\.1:9 \(Connection refused\); check"
    ),
    "a full disk": ({"free": 10**5}, None, r"folder has 0 MB free where 1 are needed; make room there"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_download_that_fails_leaves_nothing(
    fault: str, site: Site, archive: Archive, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, there, sentence = FAULTS[fault]
    root.mkdir(parents=True)
    if there is not None:
        (root / PART).write_bytes(there or bytes(len(site.files[FILE])))
    for name, value in wrong.items():
        if name == "free":
            monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=value: SimpleNamespace(free=free))
        elif hasattr(archive, name):
            archive = replace(archive, **{name: value})
        else:
            setattr(site, name, value)
    with pytest.raises((OSError, ValueError), match=sentence):
        get("cifar10", root, archives=[archive])
    assert os.listdir(root) == []


def test_archive_put_there_by_hand_is_used_and_kept(site: Site, archive: Archive, root: Path) -> None:
    root.mkdir(parents=True)
    file = root / "cifar-10-binary.tar.gz"
    file.write_bytes(b"wrong")
    with pytest.raises(ValueError, match=r"tar\.gz has the MD5 .* where .* is expected; move it away and try again"):
        get("cifar10", root, archives=[archive])
    assert file.read_bytes() == b"wrong"
    file.write_bytes(site.files[file.name])
    get("cifar10", root, archives=[archive])
    assert site.asked == []
    assert sorted(os.listdir(root)) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_silent_server(site: Site, archive: Archive, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    site.breaks_at, site.stalls = 5_000, threading.Event()
    with pytest.raises(OSError, match=r"sent nothing for 0\.2 seconds; run the same command again"):
        get("cifar10", root, archives=[archive])
    assert (root / PART).stat().st_size <= 5_000


def test_nothing_there_is_overwritten(site: Site, archive: Archive, root: Path) -> None:
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    (root / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"CIFAR-10 cannot be fetched .*; move .*cifar-10-batches-bin away and get it"):
        get("cifar10", root, archives=[archive])
    assert (root / "cifar-10-batches-bin" / "test_batch.bin").read_bytes() == b"mine"
    assert site.asked == []


def test_archive_without_all_files(site: Site, archive: Archive, root: Path, tmp_path: Path) -> None:
    made = tmp_path / "made" / "cifar-10-batches-bin"
    (made / "data_batch_2.bin").unlink()
    short = offer(site, FILE, tar_of(made), "cifar-10-batches-bin")
    with pytest.raises(ValueError, match=r"CIFAR-10 is not complete: .*data_batch_2\.bin is missing"):
        get("cifar10", root, archives=[short])


def test_what_cannot_be_fetched(tmp_path: Path) -> None:
    assert get("digits", tmp_path).startswith("digits is there already: ")
    with pytest.raises(ValueError, match=r"ImageNet cannot be fetched .*; register at https://image-net\.org/download"):
        get("imagenet", tmp_path)
    with pytest.raises(ValueError, match="folder is not a data set to fetch; name a folder of your own"):
        get("folder", tmp_path)
    with pytest.raises(ValueError, match="unknown data set 'mnist'"):
        get("mnist", tmp_path)


# Archives that would do harm

Entry = tuple[str, bytes, int]  # name, content or what a link points to, kind of file


def write_tar(file: Path, entries: list[Entry]) -> None:
    kinds = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}
    with tarfile.open(file, "w:gz") as tar:
        for name, content, kind in entries:
            member = tarfile.TarInfo(name)
            member.type = kinds[kind]
            if kind == stat.S_IFREG:
                member.size = len(content)
            else:
                member.linkname = content.decode()
            tar.addfile(member, io.BytesIO(content))


def write_zip(file: Path, entries: list[Entry]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content, kind in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr = (kind | 0o644) << 16
            zipped.writestr(info, content)


GOOD = ("set/a", b"content", stat.S_IFREG)


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (("../evil", b"x", stat.S_IFREG), "has the entry '../evil', which leads outside its folder"),
        (("set/../../evil", b"x", stat.S_IFREG), "which leads outside its folder"),
        (("/tmp/evil", b"x", stat.S_IFREG), "which leads outside its folder"),
        (("set\\..\\..\\evil", b"x", stat.S_IFREG), "which leads outside its folder"),
        (("C:/evil", b"x", stat.S_IFREG), "which leads outside its folder"),
        (("set/link", b"/etc/passwd", stat.S_IFLNK), "has 'set/link', a link or device"),
        (("set/pipe", b"", stat.S_IFIFO), "has 'set/pipe', a link or device"),
        (("set/bomb", bytes(200_000), stat.S_IFREG), "holds more than 100,000 bytes"),
        (("set/a/b", b"x", stat.S_IFREG), "is damaged"),
    ],
)
def test_harmful_archive_leaves_nothing(kind: str, entry: Entry, sentence: str, tmp_path: Path) -> None:
    file, home = tmp_path / f"archive.{kind}", tmp_path / "deep" / "data"
    (write_zip if kind == "zip" else write_tar)(file, [GOOD, entry])
    with pytest.raises(ValueError, match=sentence.replace("\\", ".")):
        unpack.unpack(file, home / "set", max_bytes=100_000)
    assert os.listdir(home) == []
    assert sorted(os.listdir(tmp_path)) == [file.name, "deep"]
    assert os.listdir(tmp_path / "deep") == ["data"]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_unpacked_as_plain_files(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"archive.{kind}"
    (write_zip if kind == "zip" else write_tar)(file, [GOOD, ("__MACOSX/x", b"", stat.S_IFREG)])
    unpack.unpack(file, tmp_path / "set", max_bytes=100)
    assert (tmp_path / "set" / "a").read_bytes() == b"content"
    assert sorted(os.listdir(tmp_path)) == [file.name, "set"]
    with pytest.raises(ValueError, match="set exists; move it away"):
        unpack.unpack(file, tmp_path / "set", max_bytes=100)
    with pytest.raises(ValueError, match="has no folder other; it is not the official archive"):
        unpack.unpack(file, tmp_path / "other", max_bytes=100)
    assert sorted(os.listdir(tmp_path)) == [file.name, "set"]


def test_encrypted_zip(tmp_path: Path) -> None:
    file = tmp_path / "archive.zip"
    write_zip(file, [GOOD])
    written = bytearray(file.read_bytes())
    written[written.index(b"PK\1\2") + 8] |= 1
    file.write_bytes(written)
    with pytest.raises(ValueError, match="'set/a', which is encrypted"):
        unpack.unpack(file, tmp_path / "set", max_bytes=100)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(kind, damage) for kind in ("tar.gz", "zip") for damage in ("half", "noise", "empty")] + [("zip", "flip")],
)
def test_damaged_archive(kind: str, damage: str, tmp_path: Path) -> None:
    """A .tar.gz has one checksum at its end, which is behind what is read: there the archive's MD5 has to do."""
    file = tmp_path / f"archive.{kind}"
    content = os.urandom(50_000)
    (write_zip if kind == "zip" else write_tar)(file, [GOOD, ("set/b", content, stat.S_IFREG)])
    written = file.read_bytes()
    middle = len(written) // 2
    flipped = written[:middle] + bytes([written[middle] ^ 255]) + written[middle + 1 :]
    damaged = {"half": written[:middle], "noise": os.urandom(1000), "empty": b"", "flip": flipped}
    file.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"archive\.\S+ is damaged \(.+\); remove it and try again"):
        unpack.unpack(file, tmp_path / "set", max_bytes=100_000)
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_archive_of_every_compression(method: int, tmp_path: Path) -> None:
    """Each has errors of its own; LZMA's were let through."""
    file = tmp_path / "archive.zip"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("set/a", bytes(range(256)) * 200)
    written = bytearray(file.read_bytes())
    for place in range(40, min(len(written), 140)):
        written[place] ^= 85
    file.write_bytes(written)
    with pytest.raises(ValueError, match=r"archive\.zip is damaged \(.+\); remove it and try again"):
        unpack.unpack(file, tmp_path / "set", max_bytes=100_000)
    assert os.listdir(tmp_path) == [file.name]
