"""Everything the program reads from outside: valid files of each kind, how they are spoiled, and what reads them."""

import contextlib
import gzip
import io
import json
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from rich.console import Console

import metaaugment.lab.search.run as searching
from metaaugment.lab import cli
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import Schedule, ScheduleSampler, SubPolicySampler
from metaaugment.lab.data import cifar, omniglot
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.data.files import ImageFiles
from metaaugment.lab.data.folder import read_folder
from metaaugment.lab.data.unpack import unpack
from metaaugment.lab.experiments import results, run, validity
from metaaugment.lab.experiments.diagnosis import INPUTS, Correlation, Diagnosis
from metaaugment.lab.experiments.experiment import load_pretrained
from metaaugment.lab.experiments.export import learned_policy
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.tables import folder_name
from metaaugment.lab.report import diagnosis as diagnosed
from metaaugment.lab.report import operations, page, preferences
from metaaugment.lab.report.policies import learned_in_words
from metaaugment.lab.search.run import SEARCHES
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.json_file import read_json
from metaaugment.lab.training.trainer import Trainer, check_identity
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.networks import NETWORKS, network

import spoiled
from spoiled import ODD, Raw, spoiled_bytes, spoiled_json, text

Files = dict[str, bytes]
Read = Callable[[Path], object]
QUIET = Console(quiet=True)
HERE = Place(device="cpu", workers=0)


POLICY, FOUND, WEIGHTS, PICTURE = "policy.safetensors", "policy.json", "weights.safetensors", "picture.png"
RUN = ("recipe.json", "log.jsonl", "result.json", "diagnosis.json", "checkpoint.safetensors", "look.safetensors")
CIFAR = replace(cifar.CIFAR10, train=("data_batch_1",), train_records=20, test_records=10, held_out=10)


class Seeds:
    """Valid files of every kind: those of a run of two epochs, what it learned, and pictures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = {file.name: file.read_bytes() for file in sorted((folder / "images").iterdir())}
        self.small = {name: content for name, content in self.images.items() if not name.startswith("huge")}

    @staticmethod
    def make(folder: Path, huge: bool = True) -> "Seeds":
        recipe = replace(RECIPES["digits"](), epochs=2, per_class=12, batch=40, policy_batch=16)
        run.train(recipe, replace(HERE, out=folder / "run"), QUIET)
        learned_policy(folder / "run").save(folder / POLICY)
        half = Correlation(0.2, 0.02)
        diagnosis = Diagnosis(120, 100, 16, 0.5, 0.2, {8: half, 50: half}, dict.fromkeys(INPUTS, half), half)
        (folder / "run" / "diagnosis.json").write_text(json.dumps(diagnosis.to_json()))
        (folder / WEIGHTS).write_bytes(safetensors.torch.save(network("small-cnn", 10).state_dict()))
        (folder / "images").mkdir()
        for name, content in (
            spoiled.images() | ({f"huge {n}": c for n, c in spoiled.bombs().items()} if huge else {})
        ).items():
            (folder / "images" / name.replace(" ", "-")).write_bytes(content)
        return Seeds(folder)

    @cache  # noqa: B019 - one per process
    def file(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def run(self, *without: str) -> Files:
        return {name: self.file(f"run/{name}") for name in RUN if name not in without}


@st.composite
def spoiled_file(draw: DrawFn, name: str, content: bytes) -> bytes:
    """A spoiled file, by the kind that its name says."""
    if name.endswith(".safetensors"):
        return draw(spoiled.spoiled_sealed(content))
    if name.endswith(".json"):
        return draw(spoiled_json(json.loads(content))).encode("utf-8", "replace")
    if name.endswith(".jsonl") and draw(st.integers(0, 3)):
        lines = content.splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        lines[place] = draw(spoiled_json(json.loads(lines[place]))).encode("utf-8", "replace")
        return b"\n".join(lines) + b"\n"
    return draw(spoiled_bytes(content))


@st.composite
def among(draw: DrawFn, files: Files, names: Sequence[str], most: int = 1) -> Files:
    """The given files, of which one or a few are spoiled."""
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=most, unique=True))
    return files | {name: draw(spoiled_file(name, files[name])) for name in chosen}


@st.composite
def some_recipe(draw: DrawFn, content: bytes) -> Files:
    """Often with a single field spoiled: of two, the one that is refused first would hide the other."""
    name, recipe = "recipe.json", json.loads(content)
    if draw(st.booleans()):
        field, value = draw(st.sampled_from(sorted(recipe))), Raw(draw(st.sampled_from(ODD)))
        return {name: text({**recipe, field: value}).encode()}
    return {name: draw(spoiled_file(name, content))}


@st.composite
def some_found_policy(draw: DrawFn) -> Files:
    folder = resources.files("metaaugment.lab.baselines") / "policies"
    values = json.loads((folder / f"{draw(st.sampled_from(published.PUBLISHED))}.json").read_text())
    for key in ("sub_policies", "log"):  # a few of them: all would take long to write
        if key in values:
            values[key] = values[key][:6]
    return {FOUND: draw(spoiled_file(FOUND, json.dumps(values).encode()))}


@st.composite
def some_weights(draw: DrawFn, content: bytes) -> Files:
    if draw(st.booleans()):
        return {WEIGHTS: safetensors.torch.save(draw(spoiled.spoiled_tensors(safetensors.torch.load(content))))}
    return {WEIGHTS: draw(spoiled.spoiled_header(content) if draw(st.integers(0, 3)) else spoiled_bytes(content))}


@st.composite
def some_image(draw: DrawFn, seeds: Seeds) -> Files:
    if len(seeds.images) > len(seeds.small) and draw(st.integers(0, 999)) == 0:
        return {PICTURE: seeds.images[draw(st.sampled_from(sorted(seeds.images.keys() - seeds.small.keys())))]}
    return {PICTURE: draw(spoiled.spoiled_image(seeds.small))}


NAMES = (
    "train", "val", "valid", "test", "a", "b", "A", "é", "\udcff", "\n", " ", ".hidden", "x" * 200, "a.png",
    "train.png",
)  # fmt: skip
LEAVES = ("1.png", "2.PNG", "3.jpg", "\udcfe.gif", ".png", "\t.bmp", "notes.txt", "a.png.part", "4.tiff")


@st.composite
def some_tree(draw: DrawFn, seeds: Seeds) -> Files:
    """Folders of images, some of them elsewhere, under all sorts of names and of all sorts of formats."""
    top = draw(st.sampled_from(("", "train/", "a/", "Train/")))
    names = [f"{top}{label}/{number}.png" for label in "ab" for number in range(8)]
    depth = st.lists(st.sampled_from(NAMES), max_size=3)
    for _ in range(draw(st.integers(0, 8))):
        names[draw(st.integers(0, len(names) - 1))] = "/".join([*draw(depth), draw(st.sampled_from(LEAVES))])
    good, kinds = seeds.small["PNG-RGB"], sorted(seeds.small)
    return {name: good if draw(st.booleans()) else seeds.small[draw(st.sampled_from(kinds))] for name in names}


@st.composite
def some_pickles(draw: DrawFn) -> Files:
    """CIFAR's pickled files, in any protocol, with a few instructions that would do harm in an ordinary unpickler."""
    protocol = draw(st.sampled_from((0, 1, 2, 4, 5)))
    files = {}
    for name, records in ((CIFAR.train[0], CIFAR.train_records), (CIFAR.test, CIFAR.test_records)):
        pixels = np.zeros((records, cifar.PIXELS), np.uint8)
        content = pickle.dumps({b"data": pixels, b"labels": [i % 10 for i in range(records)]}, protocol)
        if draw(st.integers(0, 2)):
            evil = draw(st.sampled_from(PICKLED))
            start = draw(st.sampled_from((0, 2, len(content) - 1)))
            content = content[:start] + evil + content[start:]
        files[f"{CIFAR.python}/{name}"] = draw(spoiled_bytes(content)) if draw(st.booleans()) else content
    return files


PICKLED = (
    b"cos\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nndarray\n.", b"cnumpy\ndtype\n(I9\ntR.",
    b"P1\n.", b"Q.",
    b"r\x00\x00\x00\x20.", b"Nr\xff\xff\xff\x0f", b"\x8e\x00\x00\x00\x00\x01\x00\x00\x00",
    b"\x96\x00\x00\x00\x00\x10\x00\x00\x00",
    b"(" * 100_000, b"]" * 3000 + b"a" * 3000, b"}" * 50, b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"I" + b"9" * 5000 + b"\n", b"\x8b\xff\xff\xff\x7f",
    b"\x82\x01", b"c_codecs\nencode\n(V\xe9\nVrot13\ntR.", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x93.", b"N\x93.",
)  # fmt: skip


@st.composite
def some_archive(draw: DrawFn) -> Files:
    """A .tar.gz or .zip with names that lead anywhere, with links, and with wrong sizes."""
    stream, packed = io.BytesIO(), draw(st.booleans())
    names = draw(st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=4))
    if packed:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that are there twice
            for name in names:
                info = zipfile.ZipInfo(name)
                info.external_attr = draw(st.sampled_from((0, 0o100644, 0o120777, 0o020644, 0o040755))) << 16
                zeros = b"\0" * draw(st.sampled_from((0, 10, 2**16)))
                zipped.writestr(info, zeros, draw(st.sampled_from((0, 8, 12, 14))))
        content = stream.getvalue()
        return {"x.zip": draw(spoiled_bytes(content)) if draw(st.integers(0, 3)) else content}
    with tarfile.open(fileobj=stream, mode="w", format=draw(st.sampled_from((0, 1, 2)))) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type = draw(st.sampled_from((b"0", b"0", b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"S", b"x", b"L")))
            info.size, info.linkname = draw(st.sampled_from((0, 10, 2**16))), "../../x"
            tar.addfile(info, io.BytesIO(b"\0" * info.size))
    content = stream.getvalue()
    content = gzip.compress(draw(spoiled_bytes(content)) if draw(st.integers(0, 3)) else content, 1)
    return {"x.tar.gz": draw(spoiled_bytes(content)) if draw(st.integers(0, 3)) == 0 else content}


ENTRIES = (
    "x/a", "x/b/c", "x", "x/", "x/a/b", "../x", "/x/a", "x/../../y", "x\\a", "C:x", "x/é", "x/" + "n" * 90, ".", "",
    "y/a", "x//a",
)  # fmt: skip


@st.composite
def some_search(draw: DrawFn, seeds: Seeds) -> Files:
    settings = vars(SEARCHES["dada"].settings())
    recipe = {**json.loads(seeds.file("run/recipe.json")), "method": "dada"}
    about = {"recipe": recipe, "settings": settings, "data": "0", "threads": 2}
    trials = b"".join(json.dumps({"objective": 0.5, "seconds": 1.5, "epoch": i}).encode() + b"\n" for i in range(3))
    files = {"search.json": json.dumps(about).encode(), "trials.jsonl": trials}
    return draw(among(files, tuple(files)))


@st.composite
def some_results(draw: DrawFn, seeds: Seeds) -> Files:
    result = seeds.file("run/result.json")
    row = folder_name("digits", json.loads(result)["epochs"])
    names = [f"results/{row}/{entry}-seed{n}.json" for entry in ("mine", "yours") for n in (0, 1)]
    return draw(among(dict.fromkeys(names, result), names))


# -- what reads them --------------------------------------------------------------------------------------------------


def read_policy(folder: Path) -> None:
    """A policy that can be read can also be used and described."""
    policy = LearnedPolicy.load(folder / POLICY)
    assert list(learned_in_words(policy))
    height, width = (min(side, 32) for side in policy.source.size)
    labels = torch.zeros(2, dtype=torch.long) if policy.needs_labels else None
    policy.augment(torch.zeros(2, policy.source.channels, height, width, dtype=torch.uint8), labels)


def export(folder: Path) -> None:
    learned_policy(folder)


def resume(folder: Path) -> None:
    _trainer(folder).resume()


@cache
def _trainer(folder: Path) -> Trainer:
    """The trainer of the seeds' run."""
    recipe = replace(RECIPES["digits"](), epochs=2, per_class=12, batch=40, policy_batch=16)
    return run.trainer(run.prepare(recipe, HERE, QUIET), HERE, folder, Reader(), [])


def build(folder: Path) -> None:
    """A recipe that is accepted can be started, and takes a step unless that would be a large one."""
    recipe = run.read_recipe(folder / "recipe.json")
    if recipe.network in NETWORKS:
        recipe = replace(recipe, network="small-cnn")  # others take seconds, and the recipe says nothing more of them
    experiment = run.prepare(recipe, replace(HERE, data=folder), QUIET)
    trainer = run.trainer(experiment, HERE, folder, Reader(), [])
    if recipe.batch * recipe.copies * max(trainer.train.split.images.shape[2:]) ** 2 <= 40 * 32**2:
        trainer._start_streams()
        trainer._iterate(*next(trainer._batches), trainer._validation_batches)


def look_at_run(folder: Path) -> None:
    """Everything in a report but its drawings."""
    report = page.Report.of([folder])
    assert len(report.runs) == 1
    run = report.runs[0]
    assert isinstance(run.name + run.method + run.dataset, str)
    assert [len(part.table) for part in report.data]
    assert all(policy.map is None or policy.map["rows"] for policy in report.policies)
    assert run.diagnosis is None or diagnosed.in_words(run.diagnosis)
    assert all(isinstance(sentence, str) for _, found in report.concerns + report.missing for sentence in found)


def look_at_samples(folder: Path) -> None:
    """What the page shows of single samples."""
    for policy in page.Report.of([folder]).policies:
        assert policy.samples is not None
        assert policy.run.seen is None or preferences.by_function(policy.run.seen) is not None


def draw_page(folder: Path) -> None:
    page.Report.of([folder]).save(folder / "report.html")


def use_found(folder: Path) -> None:
    found = published.find(folder / FOUND)
    sampler = ScheduleSampler(found, 10) if isinstance(found, Schedule) else SubPolicySampler(found)
    for _ in range(2):
        sampler.sample(4)
        sampler.update()
    assert published.encode(found)


def start_from(folder: Path) -> None:
    load_pretrained(_network(), folder / WEIGHTS)


_network = cache(partial(network, "small-cnn", 10))


def views(folder: Path) -> None:
    files = ImageFiles(folder, (PICTURE,), torch.zeros(1, dtype=torch.long), 8)
    for generator in (None, torch.Generator().manual_seed(0)):
        image = files.image(0, generator)
        assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)


def square(folder: Path) -> None:
    operations._square(folder / PICTURE)


def drawing(folder: Path) -> None:
    omniglot._read(folder, folder / PICTURE, 8)


def read_tree(folder: Path) -> None:
    splits = read_folder(folder, 0, size=8)
    for part in (splits.train, splits.val, splits.test):
        part.digest()
        part[len(part) - 1]


def unpack_it(folder: Path) -> None:
    archive = next(folder.glob("x.*"))
    unpack(archive, folder / "x", 2**20)


def go_on_searching(folder: Path) -> None:
    kind, place = SEARCHES["dada"], replace(HERE, resume=folder)
    recipe = replace(kind.trial(RECIPES["digits"]()), method="dada")
    found, settings, threads = searching._recorded(kind, recipe, kind.settings(), place, frozenset())
    validity.check(found)
    settings.check()
    about = read_json(folder / "search.json")
    check_identity(folder / "search.json", about, {"recipe": found.to_json(), "data": "0"})
    torch.set_num_threads(place.computing(threads))
    torch.set_num_threads(1)


def account(folder: Path) -> None:
    lab = Laboratory(RECIPES["digits"](), HERE, None, folder, QUIET)  # type: ignore[arg-type]
    searching.cost_of(lab)


def call(*words: str) -> Read:
    """A call of the program, where {} is the folder; it may end with status 0 or 2."""

    def read(folder: Path) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                cli.main([word.replace("{}", str(folder)) for word in words])
            except SystemExit as end:
                if end.code not in (0, 2, None) or "Traceback" in said.getvalue():
                    raise AssertionError(f"it ended with {end.code!r}: {said.getvalue()[-200:]}") from None

    read.__name__ = words[0]
    return read


@dataclass(frozen=True)
class Target:
    """Something that is read, how it is spoiled, and what reads it."""

    spoil: Callable[[Seeds], SearchStrategy[Files]]
    readers: tuple[Read, ...]
    share: float  # of about a thousand cases
    refuses: bool = True  # whether readers may refuse it; a report says what is missing instead


LOOKED_AT = tuple(name for name in RUN if not name.startswith("checkpoint"))


def part_of_a_run(*names: str, most: int = 1) -> Callable[[Seeds], SearchStrategy[Files]]:
    """A run without its checkpoint, of which some files are spoiled."""
    return lambda seeds: among(seeds.run("checkpoint.safetensors"), names, most)


TARGETS: dict[str, Target] = {
    "policy": Target(lambda seeds: among({POLICY: seeds.file(POLICY)}, (POLICY,)), (read_policy,), 200),
    "checkpoint": Target(
        lambda seeds: among(seeds.run("look.safetensors", "log.jsonl"), ("checkpoint.safetensors",)),
        (export, resume),
        150,
    ),
    "recipe": Target(lambda seeds: some_recipe(seeds.file("run/recipe.json")), (build,), 100),
    "run": Target(part_of_a_run(*LOOKED_AT, most=3), (look_at_run,), 160, False),
    "look": Target(part_of_a_run("look.safetensors"), (look_at_samples,), 20, False),
    "page": Target(part_of_a_run(*LOOKED_AT, most=3), (draw_page,), 0.5, False),
    "found": Target(lambda seeds: some_found_policy(), (use_found,), 150),
    "pretrained": Target(lambda seeds: some_weights(seeds.file(WEIGHTS)), (start_from,), 60),
    "image": Target(some_image, (views, square, drawing), 90),
    "tree": Target(some_tree, (read_tree,), 30),
    "pickle": Target(lambda seeds: some_pickles(), (partial(cifar.read, CIFAR, seed=0),), 40),
    "archive": Target(lambda seeds: some_archive(), (unpack_it,), 40),
    "search": Target(some_search, (go_on_searching, account), 20),
    "results": Target(some_results, (lambda folder: results.markdown(folder / "results"),), 30),
    "command": Target(
        lambda seeds: among(seeds.run() | {POLICY: seeds.file(POLICY)}, (*RUN, POLICY)),
        (call("inspect", f"{{}}/{POLICY}"), call("export", "{}", "{}/out.safetensors"),
         call("train", "digits", "--resume", "{}")),
        3,
    ),
}  # fmt: skip
