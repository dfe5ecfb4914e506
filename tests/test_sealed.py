"""Files that are whole or refused: what goes in comes out, and any damage on the way is found."""

import errno
import json
import os
import pickle
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from metaaugment.files import atomic, sealed
from metaaugment.files.sealed import Damaged
from metaaugment.lab.training.log import Log

from endings import same
from users import ordinary_user


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


# -- round trips -----------------------------------------------------------------------------------------------------

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "values": {"a": 1, "b": -0.5, "c": None, "d": True, "e": "ü ≤ \n \" ' \\ \0"},
    "lists and dictionaries": {"f": [], "g": {}, "h": [[1], {"x": 2}]},
    "large and small numbers": {"a": 2**63, "b": 1e-308, "c": 0.1 + 0.2, "d": float("inf")},
    "bits of what is no number": {"a": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])},
    "types": {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in DTYPES},
    "no dimension": {"a": torch.tensor(3), "b": torch.tensor(1.5), "c": torch.tensor(True)},
    "empty": {"a": torch.zeros(0), "b": torch.zeros(2, 0, 3, dtype=torch.int64), "c": torch.zeros(0, dtype=torch.bool)},
    "nested": {"a": {"b": [{"c": torch.arange(4)}, [torch.arange(2), 7], None]}, "d": torch.ones(1)},
    "names with points": {"body.0.weight": torch.ones(2), "body": {"0.weight": torch.zeros(2)}},
    "names with a slash": {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
    "names with a slash before them": {"/a": torch.tensor(1), "a": torch.tensor(2)},
    "the name of what stands for tensors": {"tensor": torch.tensor(1), "a": {"tensor": "a word"}},
    "the name of safetensors' own": {"__metadata__": torch.tensor(1)},
    "channels last": {"a": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)},
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back(name: str, file: Path) -> None:
    sealed.save(file, "test", TREES[name])
    assert same(sealed.load(file, "test"), TREES[name])


def test_bfloat16_comes_back(file: Path) -> None:
    """numpy has no such numbers, so they are compared as their bits."""
    value = torch.tensor([1.0, -2.5, 3e38, 1e-40]).bfloat16()
    sealed.save(file, "test", {"a": value})
    found = sealed.load(file, "test")["a"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.view(torch.int16), value.view(torch.int16))


def test_tensors_that_share_memory_come_back(file: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tree = {
        "whole": whole, "again": whole, "part": whole[1], "turned": whole.T, "column": whole[:, 1:2],
        "wide": torch.tensor([5.0]).expand(3), "last": whole.contiguous(memory_format=torch.contiguous_format)[2:],
    }  # fmt: skip
    sealed.save(file, "test", tree)
    assert same(sealed.load(file, "test"), tree)


def test_parameters_come_back_without_a_graph(file: Path) -> None:
    layer = torch.nn.Linear(2, 3)
    sealed.save(file, "test", {"layer": layer.state_dict(keep_vars=True), "twice": 2 * layer.bias})
    found = sealed.load(file, "test")
    assert torch.equal(found["layer"]["weight"], layer.weight)
    assert not found["layer"]["weight"].requires_grad
    assert not found["twice"].requires_grad


def test_keys_become_strings_and_tuples_lists(file: Path) -> None:
    """As in JSON; an optimizer's state has numbers for keys."""
    sealed.save(file, "test", {"state": {0: {"step": torch.tensor(1.0)}, 1: (2, 3)}})
    assert same(sealed.load(file, "test"), {"state": {"0": {"step": torch.tensor(1.0)}, "1": [2, 3]}})


def test_what_was_copied_is_not_what_changes_later(file: Path) -> None:
    """A checkpoint is written while training goes on."""
    value = torch.zeros(3)
    packed = sealed.copied({"a": value, "b": [value]})
    value.fill_(7)
    sealed.write(file, "test", *packed)
    assert same(sealed.load(file, "test"), {"a": torch.zeros(3), "b": [torch.zeros(3)]})


def test_a_part_of_what_was_copied_is_written_alone(file: Path) -> None:
    tree = {"look": {"a": torch.zeros(3), "b": [torch.ones(2)]}, "looks": {"a": torch.ones(1)}, "a/b": {"n": 1}}
    for name, entry in tree.items():
        part, tensors = sealed.part(*sealed.copied(tree), name)
        sealed.write(file, "test", part, tensors)
        assert same(sealed.load(file, "test"), entry)
        assert len(tensors) == len(sealed.copied(entry)[1]), "those of its neighbors are not in the file"


def test_what_is_no_json_is_refused_before_anything_is_written(file: Path) -> None:
    with pytest.raises(TypeError):
        sealed.save(file, "test", {"a": object()})
    assert not list(file.parent.iterdir())


def test_keys_that_become_one_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="1"):
        sealed.save(file, "test", {1: "a", "1": "b"})


# -- damage ----------------------------------------------------------------------------------------------------------

SMALL = {"step": 3, "w": torch.tensor([1.0, 2.0]), "l": [torch.tensor(True), "ok"]}


def poke(file: Path, place: int, value: int) -> None:
    """Put a byte in place; to write the file anew would make the disk wait."""
    with file.open("rb+", buffering=0) as content:
        content.seek(place)
        content.write(bytes([value]))


def passes(file: Path, place: int, value: int) -> bool:
    """Whether the file with another byte is taken; it must hold what it held."""
    intact = file.read_bytes()[place]
    poke(file, place, value)
    try:
        assert same(sealed.load(file, "test"), SMALL), f"byte {place} is {value}"
        return True
    except (Damaged, OSError):
        return False
    finally:
        poke(file, place, intact)


def test_any_flipped_bit_is_found(file: Path) -> None:
    """All bits of a whole file, one by one; one that is let pass, in the padding for one, must change nothing."""
    sealed.save(file, "test", SMALL)
    intact = file.read_bytes()
    passed = {p for p, value in enumerate(intact) for bit in range(8) if passes(file, p, value ^ (1 << bit))}
    # A header is filled up to eight bytes by up to seven spaces.
    assert len(passed) <= 7
    assert {intact[place] for place in passed} <= {0x20}
    assert file.read_bytes() == intact


@pytest.mark.parametrize("value", [0x00, 0x20, 0x22, 0x30, 0x5C, 0x7D, 0xFF])
def test_any_other_byte_is_found(value: int, file: Path) -> None:
    """Bytes that mean something to JSON: nothing, a space, a quote, a zero, a backslash, a brace."""
    sealed.save(file, "test", SMALL)
    intact = file.read_bytes()
    passed = [place for place in range(len(intact)) if intact[place] != value and passes(file, place, value)]
    assert not passed


def test_a_file_cut_off_anywhere_is_found(file: Path) -> None:
    sealed.save(file, "test", SMALL)
    for length in reversed(range(file.stat().st_size)):
        os.truncate(file, length)
        with pytest.raises(Damaged, match=r"is cut off or damaged"):
            sealed.load(file, "test")


def test_a_file_with_something_behind_it_is_found(file: Path) -> None:
    sealed.save(file, "test", SMALL)
    poke(file, file.stat().st_size, 0)
    with pytest.raises(Damaged):
        sealed.load(file, "test")


def test_exchanged_tensors_are_found(file: Path) -> None:
    """Of the same size and kind: the names are under the seal too."""
    tree, tensors = sealed.copied({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])})
    sealed.write(file, "test", tree, tensors)
    intact = file.read_bytes()
    one, other = (bytes(tensors[name].view(torch.uint8).tolist()) for name in ("/a", "/b"))
    assert intact.endswith(one + other)
    file.write_bytes(intact.removesuffix(one + other) + other + one)
    with pytest.raises(Damaged, match="SHA-256"):
        sealed.load(file, "test")


@pytest.mark.parametrize(("written", "forged"), [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]")])
def test_another_type_or_shape_is_found(written: bytes, forged: bytes, file: Path) -> None:
    """Of as many bytes, so that the file stays one that safetensors reads."""
    sealed.save(file, "test", {"a": torch.arange(6.0).reshape(2, 3)})
    intact = file.read_bytes()
    assert intact.count(written) == 1
    file.write_bytes(intact.replace(written, forged))
    with pytest.raises(Damaged, match="SHA-256"):
        sealed.load(file, "test")


def test_another_kind_is_named(file: Path) -> None:
    sealed.save(file, "policy", SMALL)
    with pytest.raises(Damaged, match=rf"^{file} is a policy file, not a checkpoint file$") as caught:
        sealed.load(file, "checkpoint")
    assert caught.value.file == file
    assert caught.value.reason == "is a policy file, not a checkpoint file"


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_refused_and_not_run(write: Any, file: Path) -> None:
    place = file.parent / "trapped"
    with file.open("wb") as content:
        write(Trap(place), content)
    with pytest.raises(Damaged, match=str(file)):
        sealed.load(file, "test")
    assert not place.exists()


WRONG = {"state": '{"kind": "test", "tree": {}}', "sha256": "0" * 64}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"state": "{}"}, {"sha256": "0" * 64}, WRONG])
def test_a_safetensors_file_of_someone_else_is_refused(metadata: dict[str, str] | None, file: Path) -> None:
    save_file({"weight": torch.ones(2)}, file, metadata)
    reason = "SHA-256" if metadata == WRONG else f"^{file} is not a test file of metaaugment$"
    with pytest.raises(Damaged, match=reason):
        sealed.load(file, "test")


def headed(header: dict[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "content",
    [
        (2**40).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        headed({"t": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        headed({"t": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}}) + bytes(8),
        headed({"__metadata__": None, "t": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}) + b"x",
        b"",
        b"hello",
        b"\x89PNG\r\n\x1a\n" * 20,
        b'{"a": 1}',
    ],
    ids=["header", "largest header", "tensor", "shape", "null metadata", "empty", "text", "picture", "JSON"],
)
def test_a_header_that_claims_more_than_there_is_and_other_files_are_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(Damaged, match=str(file)):
        sealed.load(file, "test")


def test_a_missing_file_and_a_folder_are_oserrors(file: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        sealed.load(file, "test")
    assert caught.value.filename == str(file)
    with pytest.raises(IsADirectoryError):
        sealed.load(file.parent, "test")


# -- writing ---------------------------------------------------------------------------------------------------------

OLD, NEW = {"n": 1, "t": torch.ones(4)}, {"n": 2, "t": torch.zeros(50_000)}


def assert_old(file: Path) -> None:
    """The old file as it was, and nothing beside it."""
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    assert same(sealed.load(file, "test"), OLD)


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, MemoryError, None])
def test_a_writer_that_fails_leaves_the_old_file(error: type[BaseException] | None, file: Path) -> None:
    """So does one that writes nothing."""
    sealed.save(file, "test", OLD)

    def write(part: Path) -> None:
        if error is not None:
            part.write_bytes(b"half of")
            raise error

    with pytest.raises(error or FileNotFoundError):
        atomic.write_atomically(file, write)
    assert_old(file)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel itself lets no file of this process grow beyond so many bytes; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_leaves_the_old_file(file: Path) -> None:
    sealed.save(file, "test", OLD)
    with no_file_above(4096), pytest.raises(OSError, match="File too large") as caught:
        sealed.save(file, "test", NEW)
    assert caught.value.filename == str(file)
    assert_old(file)
    sealed.save(file, "test", NEW)
    assert same(sealed.load(file, "test"), NEW)


def test_a_disk_that_is_full_when_it_is_flushed_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed.save(file, "test", OLD)

    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="No space left"):
            sealed.save(file, "test", NEW)
    assert_old(file)


def test_a_line_that_does_not_fit_on_the_disk_leaves_the_lines_before_it(file: Path) -> None:
    """The system takes the part that fits, without an error, and refuses the rest."""
    log = Log(file)
    log.append({"epoch": 1})
    before = file.read_bytes()
    with no_file_above(len(before) + 10), pytest.raises(OSError, match="File too large") as caught:
        log.append({"epoch": 2, "train_loss": 0.5})
    assert caught.value.filename == str(file)
    assert file.read_bytes() == before
    log.append({"epoch": 2})
    assert file.read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


def test_a_file_is_on_the_disk_before_it_is_in_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the content is flushed, then the name changes, then the folder is flushed."""
    sealed.save(file, "test", OLD)
    events, fsync = [], os.fsync

    def watched(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "content"
        events.append((kind, sealed.load(file, "test")["n"]))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    sealed.save(file, "test", NEW)
    assert events == [("content", 1), ("folder", 2)]


def test_a_folder_that_is_not_there_is_an_oserror(file: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        sealed.save(file.parent / "none" / "file", "test", OLD)
    assert caught.value.filename == str(file.parent / "none" / "file")


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_file_may_be_read_by_whom_the_umask_lets(umask: int, file: Path) -> None:
    """As any other file that a program writes; the log beside a checkpoint, for one."""
    before = os.umask(umask)
    try:
        sealed.save(file, "test", OLD)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_what_is_forbidden_is_an_oserror_that_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "state"
    sealed.save(file, "test", OLD)
    file.chmod(0)
    tmp_path.chmod(0o555)
    with ordinary_user():
        with pytest.raises(PermissionError) as caught:
            sealed.load(file, "test")
        assert caught.value.filename == str(file)
        with pytest.raises(OSError, match="Permission denied") as refused:
            sealed.save(file, "test", NEW)
        assert refused.value.filename == str(file)
    tmp_path.chmod(0o755)
    file.chmod(0o644)
    assert_old(file)


@pytest.mark.parametrize("size", [1, 4, 50_000])
def test_a_file_exchanged_while_it_is_opened_is_the_old_or_the_new(
    size: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanged where a second look by its name would begin; a smaller new file is no Damaged, but a RuntimeError."""
    new, other = {"n": 2, "t": torch.zeros(size)}, file.with_name("new")
    sealed.save(other, "test", new)
    sealed.save(file, "test", OLD)
    look = torch.UntypedStorage.from_file

    def exchange(*args: Any, **kwargs: Any) -> Any:
        if other.exists():
            other.replace(file)
        return look(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", exchange)
    found = sealed.load(file, "test")
    assert same(found, OLD) or same(found, new)


def test_whoever_reads_meanwhile_sees_the_old_or_the_new(file: Path) -> None:
    """Each generation is consistent in itself, and none comes back after a newer one."""
    sealed.save(file, "test", {"n": 0, "t": torch.zeros(5000)})
    enough, written, seen = threading.Event(), [0], [0]

    def write() -> None:
        while not enough.is_set():
            written.append(written[-1] + 1)
            sealed.save(file, "test", {"n": written[-1], "t": torch.full((5000,), float(written[-1]))})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(set(seen)) < 30:
            assert writer.is_alive()
            tree = sealed.load(file, "test")
            assert (tree["t"] == tree["n"]).all()
            seen.append(tree["n"])
    finally:
        enough.set()
        writer.join()
    assert seen == sorted(seen)
    assert sealed.load(file, "test")["n"] == written[-1]


def test_a_writer_that_never_ends_is_not_waited_for_for_ever(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "PATIENCE", 0.05)
    with (
        atomic._alone_in(file.parent),
        pytest.raises(OSError, match="another process has been writing there") as raised,
    ):
        sealed.save(file, "test", {})
    assert raised.value.filename == str(file)
    sealed.save(file, "test", {})


def test_without_locks_files_are_written_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows; but a folder that has to be locked is not trained into."""
    monkeypatch.setattr(atomic.lock, "fcntl", None)
    sealed.save(file, "test", {"a": torch.ones(2)})
    assert sealed.load(file, "test")["a"].sum() == 2
    with pytest.raises(OSError, match="No locks available") as refused:
        atomic.lock.FileLock(file).acquire()
    assert refused.value.filename == str(file)
    assert not atomic.lock.is_held(file)


def test_two_writers_of_a_file_take_turns(file: Path) -> None:
    """They share the name of its part: neither may be put in place half written by the other."""
    inside, overtaken, events = threading.Event(), threading.Event(), []

    def slowly(part: Path) -> None:
        part.write_text("first, ")
        inside.set()
        overtaken.wait(0.2)  # as it would be, if the second one did not wait
        events.append("first")
        with part.open("a") as content:
            content.write("whole")

    def quickly(part: Path) -> None:
        overtaken.set()
        events.append("second")
        part.write_text("second")

    first = threading.Thread(target=atomic.write_atomically, args=(file, slowly))
    second = threading.Thread(target=atomic.write_atomically, args=(file, quickly))
    first.start()
    inside.wait()
    second.start()
    first.join()
    second.join()
    assert events == ["first", "second"]
    assert file.read_text() == "second"
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_what_a_killed_writer_left_is_taken_over(file: Path) -> None:
    left = file.with_name(f".{file.name}.part")
    left.write_bytes(b"half of a much longer file" * 100_000)
    sealed.save(file, "test", OLD)
    assert_old(file)
