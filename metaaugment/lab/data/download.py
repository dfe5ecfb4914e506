"""Official archives fetched, checked and unpacked."""

import hashlib
import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from metaaugment.lab.data.catalog import find, way_out
from metaaugment.lab.data.entry import Archive, Missing, Progress, data_root, silent
from metaaugment.lab.data.unpack import unpack

# Seconds without a byte after which a server counts as gone.
TIMEOUT = 30.0
BLOCK = 2**18
AGAIN = "run the same command again to continue from there"


def get(
    name: str, root: Path | str | None = None, progress: Progress = silent, archives: Sequence[Archive] | None = None
) -> str:
    """Fetch a data set into `root`, and say in a sentence where it is. Nothing that is there is overwritten.

    `archives`: other addresses for the same. A later call resumes an interrupted download. Raises ValueError for data
    that cannot be fetched this way or arrive damaged, and OSError for failures of the network or the disk.
    """
    entry, where = find(name), data_root(root)
    if entry.locate is None:
        raise ValueError(f"{name} is not a data set to fetch; {entry.how}")
    try:
        return f"{entry.title} is there already: {entry.locate(where)}"
    except Missing as missing:
        archives = entry.archives if archives is None else archives
        absent = [archive for archive in archives if not (where / archive.unpacks_to).exists()]
        if not absent:
            raise ValueError(f"{entry.title} cannot be fetched ({missing}); {way_out(name, where, missing)}") from None
    for archive in absent:
        _get_archive(archive, where, progress)
    try:
        return f"{entry.title} is complete: {entry.locate(where)}"
    except Missing as missing:
        raise ValueError(f"{entry.title} is not complete: {missing}; {way_out(name, where, missing)}") from None


def _get_archive(archive: Archive, root: Path, progress: Progress) -> None:
    """Fetch and unpack one archive; one that was put there by hand is used and left there."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / archive.url.rpartition("/")[2]
    by_hand = file.exists()
    if by_hand:
        found = md5(file)
        if found != archive.md5:
            raise ValueError(f"{file} has the MD5 {found} where {archive.md5} is expected; move it away and try again")
    else:
        _fetch(archive, file, progress)
    unpack(file, root / archive.unpacks_to, archive.max_bytes, progress)
    if not by_hand:
        file.unlink()


def md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(archive: Archive, file: Path, progress: Progress) -> None:
    """Download to FILE.part, and rename it when its checksum is right."""
    part = file.with_name(f"{file.name}.part")
    # It is complete already if a run was stopped between the last byte and the renaming.
    if not part.exists() or md5(part) != archive.md5:
        _download(archive, part, progress)
        found = md5(part)
        if found != archive.md5:
            part.unlink()
            raise ValueError(
                f"{archive.url} has the MD5 {found} where {archive.md5} is expected; the file is removed, try again"
            )
    os.replace(part, file)


def _download(archive: Archive, part: Path, progress: Progress) -> None:
    """Download the bytes that are missing from a file, or all if the server does not send a part."""
    start = part.stat().st_size if part.exists() else 0
    host = urllib.request.Request(archive.url).host
    try:
        with _open(archive.url, start) as response:
            begin, total = _range(response)
            if begin not in (0, start):
                part.unlink()
                raise OSError(f"{host} did not send the part of {part} that was asked for; it is removed, try again")
            _check_space(part.parent, (total or begin) - begin + archive.max_bytes)
            done = _copy(response, part, begin, total, archive, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()
            raise ValueError(f"{part} was as long as the archive, but not the same; it is removed, try again") from None
        raise OSError(f"{archive.url}: the server answers {error.code} {error.reason}; try again later") from None
    except urllib.error.URLError as error:
        raise OSError(f"no connection to {host} ({_plain(error.reason)}); check the network and try again") from None
    except TimeoutError:
        raise OSError(f"{host} sent nothing for {TIMEOUT:g} seconds; {AGAIN}") from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise OSError(f"the connection to {host} broke off ({_plain(error)}); {AGAIN}") from None
    if total is not None and done < total:
        raise OSError(f"the connection to {host} broke off at {done:,} of {total:,} bytes; {AGAIN}")


def _open(url: str, start: int) -> http.client.HTTPResponse:
    headers = {"User-Agent": "metaaugment"} | ({"Range": f"bytes={start}-"} if start else {})
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)


def _range(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where in the archive the response begins (-1: unknown), and the length of the archive, if the server tells."""
    if response.status == http.HTTPStatus.PARTIAL_CONTENT:
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        return (int(told[1]), None if told[2] == "*" else int(told[2])) if told else (-1, None)
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{folder} has {free / 1e6:,.0f} MB free where {needed / 1e6:,.0f} are needed; make room there")


def _copy(
    response: http.client.HTTPResponse, part: Path, start: int, total: int | None, archive: Archive, progress: Progress
) -> int:
    """Write the response to the file from `start` on; returns the length of the file afterwards."""
    name, done = part.name.removesuffix(".part"), start
    with part.open("r+b" if start else "wb") as out:
        out.seek(start)
        while block := response.read(BLOCK):
            out.write(block)
            done += len(block)
            progress(f"fetching {name}", done, total)
            if done > archive.max_bytes:
                part.unlink()
                raise ValueError(
                    f"{archive.url} is longer than {archive.max_bytes:,} bytes, so it is not the archive; it is removed"
                )
    return done


def _plain(error: object) -> str:
    """An exception in words; an error of the system without its number."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return words or type(error).__name__
