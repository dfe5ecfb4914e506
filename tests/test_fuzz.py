"""What `fuzz.py` found, each by its name; a fixed few of its cases; and that it sees what it looks for."""

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st
from PIL import Image

import metaaugment.lab.search.run as searching
from metaaugment.files.sealed import Damaged, load
from metaaugment.lab.baselines import published
from metaaugment.lab.data import CorruptImage, omniglot, pickles
from metaaugment.lab.data.entry import Missing
from metaaugment.lab.data.files import MOST_PIXELS, read_image
from metaaugment.lab.data.unpack import unpack
from metaaugment.lab.experiments import results, validity
from metaaugment.lab.experiments.diagnosis import INPUTS, Correlation, Diagnosis
from metaaugment.lab.experiments.experiment import load_pretrained
from metaaugment.lab.experiments.export import learned_policy
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.experiments.tables import folder_name
from metaaugment.lab.report import operations, seen
from metaaugment.lab.search.run import SEARCHES
from metaaugment.lab.search.trials import TRIALS, Laboratory
from metaaugment.lab.training.json_file import read_json
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.networks import network

import harm
from fuzz import fuzz_all
from harm import Account, Watch, judge
from outside import HERE, POLICY, QUIET, TARGETS, Seeds, Target, resume
from spoiled import images, opened, seal, sized

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return Seeds.make(tmp_path_factory.mktemp("seeds"), huge=False)


# -- a fixed few of the cases -----------------------------------------------------------------------------------------


def test_files_from_outside_do_no_harm(tmp_path: Path) -> None:
    """All targets, the same cases each time; `python tests/fuzz.py --cases 100000` has more of them."""
    accounts = fuzz_all(list(TARGETS), 700, 7, 1, tmp_path / "faults", huge=False)
    assert sum(account.cases for account in accounts.values()) >= 700
    assert [str(fault) for account in accounts.values() for fault in account.faults] == []


# -- what was found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        *("[]", "3", "null", '"policy"', "{", DEEP, "9" * 5000),
        *('{"kind": "test"}', '{"tree": {}}', '{"kind": "test", "tree": []}', '{"kind": "test", "tree": 3}'),
        *(f'{{"kind": "test", "tree": {{"p": {{"@tensor": {name}}}}}}}' for name in ('"/q"', "[]", "0", "null")),
        f'{{"kind": "test", "tree": {"{" + chr(34) + "a" + chr(34) + ":"}{DEEP}}}}}',
    ],
    ids=lambda state: state[:50],
)
def test_a_state_of_another_form_is_damage(state: str, tmp_path: Path) -> None:
    """Its SHA-256 is right, so that it is another program's. It was a KeyError, TypeError or RecursionError."""
    file = tmp_path / "file.safetensors"
    file.write_bytes(seal(state, {"/p": torch.zeros(3)}))
    with pytest.raises(Damaged, match=r"file\.safetensors is not an intact test: its state is"):
        load(file, "test")


def resealed(seeds: Seeds, name: str, file: Path, change: Callable[[Any, Any], object]) -> Path:
    """A file of the seeds with another tree or other tensors, under a right SHA-256."""
    state, tensors = opened(seeds.file(name))
    change(state["tree"], tensors)
    file.write_bytes(seal(json.dumps(state), tensors))
    return file


def changed(seeds: Seeds, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A run whose checkpoint has another tree."""
    name = "checkpoint.safetensors"
    resealed(seeds, f"run/{name}", folder / name, lambda tree, tensors: change(tree))
    (folder / "recipe.json").write_bytes(seeds.file("run/recipe.json"))
    return folder


@pytest.mark.parametrize(
    ("change", "who"),
    [
        (lambda tree: tree.pop("identity"), (learned_policy, resume)),
        (lambda tree: tree.update(identity=3), (learned_policy, resume)),
        (lambda tree: tree.update(learner=[]), (learned_policy, resume)),
        (lambda tree: tree.update(network={}), (learned_policy, resume)),
        (lambda tree: tree["identity"].update(num_classes="10"), (learned_policy,)),
        (lambda tree: tree["generators"].pop("cpu"), (resume,)),
        (lambda tree: tree["optimizers"].update(task=None), (resume,)),
        (lambda tree: tree.update(log=3), (resume,)),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_damage(
    change: Callable[[dict[str, Any]], None],
    who: tuple[Callable[[Path], object], ...],
    seeds: Seeds,
    tmp_path: Path,
) -> None:
    """By `export` and by `--resume` it was a KeyError, a TypeError or a RuntimeError of torch."""
    folder = changed(seeds, tmp_path, change)
    for read in who:
        with pytest.raises(Damaged, match=r"checkpoint\.safetensors does not fit together .*; there is no other"):
            read(folder)


def test_a_policy_may_name_images_that_its_own_extractor_cannot_see(seeds: Seeds, tmp_path: Path) -> None:
    """It was torch's RuntimeError where it is used."""
    file = resealed(seeds, POLICY, tmp_path / POLICY, lambda tree, tensors: tree.update(size=[1, 16]))
    policy = LearnedPolicy.load(file)
    labels = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"fails on images of 1 by 16 pixels .* recorded as learned on images of this"):
        policy.augment(torch.zeros(2, policy.source.channels, 1, 16, dtype=torch.uint8), labels)


def test_a_policy_is_refused_in_a_line(seeds: Seeds, tmp_path: Path) -> None:
    """Whatever it has: here p stands where the name of a space should."""
    file = resealed(
        seeds, POLICY, tmp_path / POLICY, lambda tree, tensors: tree["space"].update(name={"@tensor": "/p"})
    )
    with pytest.raises(Damaged, match=r"cannot be used here: unknown space tensor") as refused:
        LearnedPolicy.load(file)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 1000


def test_what_differs_in_a_checkpoint_is_said_in_a_line(seeds: Seeds, tmp_path: Path) -> None:
    """Whatever it is: here a whole optimizer stands where the name of a policy should."""
    folder = changed(seeds, tmp_path, lambda tree: tree["identity"].update(policy=tree["optimizers"]["policy"]))
    with pytest.raises(
        ValueError, match=r"^[^\n]{,300} belongs to another run: its policy is \{'0'[^\n]{,100} …, not None; [^\n]*$"
    ):
        resume(folder)


def test_the_size_of_a_network_in_a_checkpoint_is_not_believed(seeds: Seeds, tmp_path: Path) -> None:
    """2 ** 40 classes would be a matrix of 512 TiB; the tensors that are there have 10."""
    folder = changed(seeds, tmp_path, lambda tree: tree["identity"].update(num_classes=2**40))
    with pytest.raises(Damaged, match="does not fit together"):
        learned_policy(folder)


def test_what_is_no_file_or_no_tree_is_refused(tmp_path: Path) -> None:
    """A device would be read for ever; and JSON may not be deeper than it can be read."""
    with pytest.raises(Damaged, match="/dev/zero is a device"):
        load(Path("/dev/zero"), "policy")
    with pytest.raises(ValueError, match=r"/dev/zero is not a policy .*: it is a device"):
        published.find("/dev/zero")
    (tmp_path / "result.json").write_text(f'{{"a": {DEEP}}}')
    with pytest.raises(ValueError, match=r"result\.json is damaged: it is not valid JSON"):
        read_json(tmp_path / "result.json")
    with pytest.raises(ValueError, match="the recipe is a str, not an object"):
        Recipe.from_json("digits")  # type: ignore[arg-type]


def test_export_is_the_same_as_before(seeds: Seeds) -> None:
    """By a second route: the network and the policy as the checkpoint has them."""
    folder = seeds.folder / "run"
    policy, state = learned_policy(folder), load(folder / "checkpoint.safetensors", "checkpoint")
    for module, tensors in zip(policy.modules, (state["learner"]["policy"], state["network"]), strict=True):
        assert module.state_dict().keys() == tensors.keys()
        assert all(torch.equal(value, tensors[name]) for name, value in module.state_dict().items())
    assert torch.equal(policy.probabilities, state["learner"]["sampler"]["probabilities"])


@pytest.mark.parametrize(("name", "most"), [("copies", 1024), ("crop", 65_535), ("cutout", 65_535)])
def test_a_recipe_has_no_number_that_no_tensor_has_room_for(name: str, most: int) -> None:
    recipe = RECIPES["digits"]()
    validity.check(replace(recipe, **{name: most}))
    for value in (most + 1, 2**31, 2**70):
        with pytest.raises(ValueError, match=f"--{name} is {value}; it must be"):
            validity.check(replace(recipe, **{name: value}))


@pytest.mark.parametrize("name", ["lr", "alpha", "clip"])
def test_a_number_of_a_recipe_is_one_that_can_be_computed_with(name: str) -> None:
    """JSON has whole numbers without end; the learner made floats of them, and torch integers of 64 bits."""
    recipe = RECIPES["digits"]().to_json()
    assert type(getattr(Recipe.from_json({**recipe, name: 2}), name)) is float
    for value in (2**100, 1e308):
        with pytest.raises(ValueError, match=f"--{name} is .*; it must be .*below 1e\\+30"):
            validity.check(Recipe.from_json({**recipe, name: value}))
    with pytest.raises(ValueError, match=f"the recipe field '{name}' is 1000"):
        Recipe.from_json({**recipe, name: 10**400})


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 10**400}, {"accuracy": float("nan")}, {"chance": -1}, {"update": "16"}, {"learns": "yes"},
        {"sees": ["pair"]},
        {"captured": {"mean": 10**400, "deviation": 0}}, {"captured": {"mean": float("nan"), "deviation": 0}},
        {"noise": {"50": {"mean": 7.0, "deviation": 0.1}}},
    ],
)  # fmt: skip
def test_a_diagnosis_has_numbers_that_can_be_said(changes: dict[str, Any]) -> None:
    """They went into the page, and made an OverflowError there."""
    half = Correlation(0.2, 0.02)
    good = Diagnosis(120, 100, 16, 0.5, 0.2, {50: half}, dict.fromkeys(INPUTS, half), half)
    assert Diagnosis.from_json(json.loads(json.dumps(good.to_json()))) == good
    with pytest.raises(ValueError, match="the diagnosis is damaged"):
        Diagnosis.from_json({**good.to_json(), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"test_accuracy": "0.9"}, {"seconds": 10**400}, {"epochs": [2]}, {"seconds": None},
        {"images_per_second": float("nan")}, {"machine": 3}, {"commit": ["a", 2]}, {"side_by_side": "4"},
        {"recipe": ["digits"]},
    ],
)  # fmt: skip
def test_a_result_has_what_a_table_needs(changes: dict[str, Any], seeds: Seeds, tmp_path: Path) -> None:
    """RESULTS.md was a TypeError."""
    good = json.loads(seeds.file("run/result.json"))
    file = tmp_path / folder_name("digits", good["epochs"]) / "mine-seed0.json"
    file.parent.mkdir()
    file.write_text(json.dumps(good))
    assert f"| {100 * good['test_accuracy']:.2f} |" in results.markdown(tmp_path)
    file.write_text(json.dumps({**good, **changes}))
    with pytest.raises(ValueError, match=r"mine-seed0\.json is damaged"):
        results.markdown(tmp_path)


def test_a_trial_without_its_cost_is_none(tmp_path: Path) -> None:
    rows = ({"objective": 0.5, "seconds": 1.5}, {"objective": 0.5}, {"seconds": "1"}, {"seconds": float("nan")},
            {"seconds": 10**400}, [1], 3)  # fmt: skip
    (tmp_path / TRIALS).write_text("\n".join([*map(json.dumps, rows), DEEP]))
    lab = Laboratory(RECIPES["digits"](), HERE, None, tmp_path, QUIET)  # type: ignore[arg-type]
    assert searching.cost_of(lab)["seconds"] == 1.5
    assert searching.cost_of(lab)["trials"] == 1


@pytest.mark.parametrize(
    "settings", [{"temperature": [1]}, {"temperature": "hot"}, {"sub_policies": 2.5}, {"sub_policies": None}]
)
def test_settings_of_a_search_are_of_their_kinds(settings: dict[str, Any], tmp_path: Path) -> None:
    kind = SEARCHES["dada"]
    recipe = replace(kind.trial(RECIPES["digits"]()), method="dada")
    about = {"recipe": recipe.to_json(), "settings": {**asdict(kind.settings()), **settings}, "data": "0"}
    (tmp_path / "search.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=rf"search\.json cannot be understood: the search field '{next(iter(settings))}'"
    ):
        searching._recorded(kind, recipe, kind.settings(), replace(HERE, resume=tmp_path), frozenset())


def test_levels_have_a_most_that_can_be_divided_by(tmp_path: Path) -> None:
    pairs = [[["Rotate", 0.5, 3], ["Invert", 1, None]]]
    about = {"system": "faa", "space": "autoaugment", "source": "", "sub_policies": pairs}
    assert published.decode({**about, "max_level": 10}).max_level == 10
    with pytest.raises(ValueError, match="is not a number of at most 1e9"):
        published.decode({**about, "max_level": 10**400})


LOOKS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "no epoch": (lambda tree, tensors: tree.update(epoch=float("inf")), "does not fit together|is of another version"),
    "no labels": (
        lambda tree, tensors: tensors.update({"/look/negatives/label": torch.full((48,), torch.nan)}),
        "does not fit together|is of another version",
    ),
    **{
        f"several numbers for {name}": (
            lambda tree, tensors, name=f"/look/{name}": tensors.update({name: tensors[name][:, None]}),
            ".*it has several numbers for a sample where one is expected",
        )
        for name in ("negatives/similarity", "negatives/label", "samples/weight", "samples/loss")
    },
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_look_has_a_whole_number_for_each_sample(kind: str, seeds: Seeds, tmp_path: Path) -> None:
    change, sentence = LOOKS[kind]
    with pytest.raises(ValueError, match=rf"look\.safetensors ({sentence})"):
        seen.read(resealed(seeds, "run/look.safetensors", tmp_path / "look.safetensors", change))


def test_numbers_of_a_look_may_be_of_other_types(seeds: Seeds, tmp_path: Path) -> None:
    """numpy has no bfloat16; and as floats, labels were no places in a list of names."""

    def change(tree: Any, tensors: Any) -> None:
        tensors["/look/samples/magnitudes"] = tensors["/look/samples/magnitudes"].bfloat16()
        tensors["/look/negatives/label"] = tensors["/look/negatives/label"].float()
        given.update(tensors)

    given: dict[str, torch.Tensor] = {}
    found = seen.read(resealed(seeds, "run/look.safetensors", tmp_path / "look.safetensors", change))
    magnitudes = found.transformation.magnitudes.numpy()
    assert np.array_equal(magnitudes, given["/look/samples/magnitudes"].float().numpy())
    names = [found.name(label) for label in found.pictures.negative_labels]
    assert names == [str(int(label)) for label in given["/look/negatives/label"]]


def test_counters_of_pretrained_weights_have_a_shape_too(tmp_path: Path) -> None:
    net = network("small-cnn", 10)
    weights = {**net.state_dict(), "body.1.num_batches_tracked": torch.zeros(3, dtype=torch.long)}
    safetensors.torch.save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"body\.1\.num_batches_tracked is \(\) in the network and \(3,\) in the file"):
        load_pretrained(net, tmp_path / "weights.safetensors")


# -- images -----------------------------------------------------------------------------------------------------------


def test_a_program_is_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS is one, which Pillow has Ghostscript run where there is such a thing, whatever the file is called."""
    run: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: run.append(args))
    monkeypatch.setattr(subprocess, "check_call", lambda *args, **named: run.append(args))
    (tmp_path / "photo.png").write_bytes(images()["EPS RGB"])
    with pytest.raises(CorruptImage, match="not in a format"):
        read_image(tmp_path / "photo.png")
    assert run == []


@pytest.mark.parametrize("kind", ["PNG RGBA", "JPEG RGB", "GIF P", "BMP RGB", "PPM RGB", "TIFF RGB"])
def test_a_huge_image_is_refused_before_it_is_decoded(kind: str, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(sized(images()[kind], 8192, 8193))
    with pytest.raises(CorruptImage, match=r"8,192 × 8,193 pixels, more than 67,108,864"):
        read_image(tmp_path / "photo.png")


def test_a_large_photo_is_read(tmp_path: Path) -> None:
    """Of half as many pixels as may be; a bit each, so that it is quickly made."""
    side = int((MOST_PIXELS / 2) ** 0.5)
    Image.new("1", (side, side), 1).save(tmp_path / "photo.png")
    picture = read_image(tmp_path / "photo.png")
    assert (picture.size, picture.mode, picture.getpixel((side - 1, 0))) == ((side, side), "RGB", (255, 255, 255))


@pytest.mark.parametrize("kind", ["PNG RGB", "GIF P"])
def test_whoever_reads_an_image_refuses_a_bomb(kind: str, tmp_path: Path) -> None:
    """Where Pillow raised an exception of its own, Omniglot's reader and `ops --image` did not know it."""
    file = tmp_path / "photo.png"
    file.write_bytes(sized(images()[kind], 65_000, 65_000))
    with pytest.raises(Missing, match=r"photo\.png is not an image \(.*pixels"):
        omniglot._read(tmp_path, file, 8)
    with pytest.raises(ValueError, match=r"photo\.png cannot be read as an image \(.*pixels"):
        operations._square(file)


# -- archives and pickles ---------------------------------------------------------------------------------------------


def test_a_name_in_an_archive_may_be_empty(tmp_path: Path) -> None:
    """Python's zipfile looks for its last letter."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as zipped:
        zipped.writestr("x", b"")
    content = stream.getvalue().replace(b"\x01\0\0\0x", b"\0\0\0\0", 1)  # the name of the file, and its length
    directory = content.rindex(b"PK\1\2")
    entry = content[directory : directory + 28] + b"\0\0" + content[directory + 30 : directory + 46]
    end = bytearray(content[content.rindex(b"PK\5\6") :])
    end[12:20] = len(entry).to_bytes(4, "little") + directory.to_bytes(4, "little")
    (tmp_path / "x.zip").write_bytes(content[:directory] + entry + end)
    with zipfile.ZipFile(tmp_path / "x.zip") as zipped:
        assert zipped.namelist() == [""]
    with pytest.raises(ValueError, match=r"x\.zip is damaged"):
        unpack(tmp_path / "x.zip", tmp_path / "x", 1000)
    assert sorted(os.listdir(tmp_path)) == ["x.zip"]


# 2 ** 44 bytes, says each of the first three, and ends; at place 2 ** 28 one had 4 GiB for all the places up to it.
MUCH = (2**44).to_bytes(8, "little") + b"few."
PICKLES = {
    "a bytearray": (b"\x80\x05\x96" + MUCH, "expected 17592186044416 bytes .* only 4 remain"),
    "bytes": (b"\x80\x05\x8e" + MUCH, "expected 17592186044416 bytes .* only 4 remain"),
    "a text": (b"\x80\x05\x8d" + MUCH, "expected 17592186044416 bytes .* only 4 remain"),
    "a far place": (b"}r\x00\x00\x00\x10.", "it uses memo index 268,435,456"),
    "several lines": (b"P1\n.", r"[^\n]*persistent[^\n]*$"),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_is_refused_in_a_line_and_takes_no_memory(kind: str, tmp_path: Path) -> None:
    content, sentence = PICKLES[kind]
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(ValueError, match=f"^not a pickle of data: {sentence}"):
        pickles.load(tmp_path / "batch")


# -- whether harm would be seen ---------------------------------------------------------------------------------------


def reading(*readers: Callable[[Path], object]) -> Target:
    return Target(lambda seeds: st.nothing(), readers, 1)


def raises(error: BaseException) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        raise error

    return read


def swallows(folder: Path) -> None:
    """Has no memory, and says it in a sentence."""
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("it cannot be read") from None


def takes_time(folder: Path) -> None:
    while True:
        pass


HARMFUL: dict[str, tuple[Callable[[Path], object], str]] = {
    "another exception": (raises(KeyError("tree")), "KeyError"),
    "an exit": (raises(SystemExit(0)), "SystemExit"),
    "two lines": (raises(ValueError("one\ntwo")), "no sentence"),
    "nothing said": (raises(ValueError()), "no sentence"),
    "a command": (lambda folder: os.system("true"), "harm: os.system"),
    "a program": (lambda folder: subprocess.run(["true"]), "harm: subprocess.Popen"),
    "a socket": (lambda folder: socket.socket(), "harm: socket"),
    "code": (lambda folder: eval("1"), "harm: compile"),
    "an import": (lambda folder: __import__("antigravity"), "harm: import"),
    "a file elsewhere": (lambda folder: (folder.parent / "file").write_text(""), "harm: open"),
    "a folder elsewhere": (lambda folder: (folder.parent / "folder").mkdir(), "harm: os.mkdir"),
    "a file taken away": (lambda folder: os.remove(folder.parent / "kept"), "harm: os.remove"),
    "no memory": (swallows, "memory"),
    "no end": (takes_time, "Hang"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harm_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    monkeypatch.setattr(harm, "SECONDS", 0.2)
    read, what = HARMFUL[name]
    (tmp_path / "case").mkdir()
    (tmp_path / "kept").touch()
    (fault,) = judge("test", reading(read), tmp_path / "case", watch, Account())
    assert what in fault.what
    assert sorted(os.listdir(tmp_path)) == ["case", "kept"]


def test_memory_is_measured(tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harm, "BYTES", 2**26)
    gc.collect()  # what earlier tests left would go meanwhile
    target = reading(lambda folder: os.urandom(2**27))
    account = Account()
    (fault,) = judge("test", target, tmp_path, watch, account)
    assert "MiB of memory" in fault.what
    assert 0.9 * 2**27 < account.memory < 2**29


def test_what_is_permitted_is_no_fault(tmp_path: Path, watch: Watch) -> None:
    readers = (
        raises(ValueError("a sentence")),
        raises(FileNotFoundError(2, "no")),
        lambda folder: (folder / "a").touch(),
    )
    account = Account()
    assert judge("test", reading(*readers), tmp_path, watch, account) == []
    assert (account.read, account.refused) == (1, 2)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


def dies(jobs: Connection, source: Path, folder: Path, faults: Path, done: Any) -> None:
    """In place of `fuzz.work`: is killed by the third case of the first chunk that it gets, and finds no other bad."""
    jobs.send(None)
    while (job := jobs.recv()) is not None:
        if job[1] < 500_000:
            folder.mkdir(exist_ok=True)
            (folder / "bad").write_text("third")
            done.value = 2
            os.kill(os.getpid(), signal.SIGSEGV)
        jobs.send(Account(cases=job[2]))


def test_a_process_that_dies_is_a_fault_of_the_case_it_read(tmp_path: Path) -> None:
    account = fuzz_all(["found"], 10, 0, 1, tmp_path, huge=False, work=dies)["found"]
    (fault,) = account.faults
    assert (fault.what, fault.case) == (f"the process died with status -{signal.SIGSEGV}", 2)
    assert (Path(fault.folder) / "bad").read_text() == "third"
    assert account.cases == 10


def test_a_case_can_be_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as whoever looks into it does."""
    kept = tmp_path / "found-1-2"
    kept.mkdir()
    (kept / "policy.json").write_text("[]")
    words = [sys.executable, str(Path(__file__).parent / "fuzz.py"), "--replay", str(kept)]
    assert subprocess.run(words).returncode == 0
