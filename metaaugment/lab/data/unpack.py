"""Archives unpacked so that a bad one harms nothing, and a broken one never looks complete."""

import gzip
import lzma
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from metaaugment.lab.data.entry import Progress, silent

MAX_ENTRIES = 200_000
BLOCK = 2**20
# What unpacking a damaged archive may raise; the last three come from names that collide.
DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
)


class Item(NamedTuple):
    """A file of an archive and its content, or a folder and None."""

    name: str
    size: int
    content: IO[bytes] | None


def unpack(archive: Path, target: Path, max_bytes: int, progress: Progress = silent) -> None:
    """Unpack the folder of the target's name from a .zip or .tar.gz to the target, which must not exist.

    It is unpacked into a folder beside the target, and renamed when complete. Raises ValueError for an archive that is
    damaged, has names that lead out of it, links or devices, or holds more than `max_bytes`.
    """
    if target.exists():
        raise ValueError(f"{target} exists; move it away, and unpack {archive} again")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        try:
            _write(archive, work, max_bytes, progress)
        except (*DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, DAMAGED):
                raise  # the disk's fault; bzip2's own errors have no number
            reason = str(error) or type(error).__name__
            raise ValueError(f"{archive} is damaged ({reason}); remove it and try again") from None
        if not (work / target.name).is_dir():
            raise ValueError(f"{archive} has no folder {target.name}; it is not the official archive")
        os.rename(work / target.name, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(archive: Path, folder: Path, max_bytes: int, progress: Progress) -> None:
    """Write all files of an archive into a folder, as plain files whatever owner and permissions it gives them."""
    items = _zip_items if archive.suffix == ".zip" else _tar_items
    done = 0
    for number, item in enumerate(items(archive)):
        place = folder / _inside(archive, item.name)
        done += item.size
        if done > max_bytes or number >= MAX_ENTRIES:
            raise ValueError(
                f"{archive} holds more than {max_bytes:,} bytes or {MAX_ENTRIES:,} files; it is not unpacked"
            )
        if item.content is None:
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb") as out:
                shutil.copyfileobj(item.content, out, BLOCK)
        progress(f"unpacking {archive.name}", done, None)


def _inside(archive: Path, name: str) -> PurePosixPath:
    """A name in an archive as a path; ValueError for one that leads out of it, on any system."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or any(sign in name for sign in "\\:\0"):
        raise ValueError(f"{archive} has the entry {name!r}, which leads outside its folder; it is not unpacked")
    return path


def _tar_items(archive: Path) -> Iterator[Item]:
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if not member.isreg() and not member.isdir():
                raise ValueError(f"{archive} has {member.name!r}, a link or device; it is not unpacked")
            yield Item(member.name, member.size, tar.extractfile(member))


def _zip_items(archive: Path) -> Iterator[Item]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            # The upper half holds the Unix file type; 0 if the archive is from another system.
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise ValueError(f"{archive} has {info.filename!r}, a link or device; it is not unpacked")
            if info.flag_bits & 1:
                raise ValueError(f"{archive} has {info.filename!r}, which is encrypted; it is not unpacked")
            if info.filename.endswith("/"):
                yield Item(info.filename, 0, None)
            else:
                with zipped.open(info) as content:
                    yield Item(info.filename, info.file_size, content)
