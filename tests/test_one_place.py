"""What is known of a data set stands in its entry, and of a method in its: a new one of either needs no other place."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from metaaugment.lab.experiments.flags import flag
from metaaugment.lab.experiments.methods import LEARNING, METHODS
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.run import SEARCHES

PACKAGE = Path(__file__).parent.parent / "metaaugment"

# A data set of two colors, and a method that inverts every image. Both are there before the program begins, as if they
# stood in the catalog and in the table of methods.
TOYS = """
import sys

import torch

from metaaugment.lab.data import DATASETS, Images
from metaaugment.lab.data.entry import Entry
from metaaugment.lab.data.splits import Splits, split
from metaaugment.lab.experiments.methods import METHODS, Method
from metaaugment.ops import INDEX
from metaaugment.sampler import Sampler
from metaaugment.transformation import Transformation, device_of


def read(ask):
    labels = torch.arange(60) % 2
    images = (labels * 200 + 20).byte()[:, None, None, None].repeat(1, 3, ask.size, ask.size)
    parts = split(labels, ask.seed, [5, 5], [5, 5])
    val, test, train = (Images(images[part], labels[part]) for part in parts)
    return Splits(train, val, test, ("dark", "bright"), "two colors")


class Inverting(Sampler):
    def sample(self, n, generator=None):
        first, second = (torch.full((n,), INDEX[name], device=device_of(generator)) for name in ("Invert", "Identity"))
        return Transformation.draw(first, second, generator)


DATASETS["toys"] = Entry("Toys", read, lambda root: root, size=8, sizes=range(8, 9), like="svhn")
METHODS["inverting"] = Method(lambda recipe, found: Inverting())

from metaaugment.lab.cli import main

main(sys.argv[1:])
"""


def with_toys(folder: Path, *words: str) -> str:
    command = [sys.executable, "-W", "error", "-c", TOYS, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_a_new_data_set_and_a_new_method_are_an_entry_each(tmp_path: Path) -> None:
    toys = "train", "digits", "--dataset", "toys", "--epochs", "1"
    said = with_toys(tmp_path, *toys, "--batch", "8", "--method", "inverting", "--out", "run", "--epsilon", "0.5")
    assert "inverting on the CPU" in said
    assert "toys, 40 / 10 / 10 images in 2 classes" in said
    assert "two colors" in said
    assert "--epsilon has no effect: --method inverting learns no policy" in said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["method"], result["recipe"]["dataset"], result["data"]["test"]) == ("inverting", "toys", 10)
    assert result["space"] == "trivialaugment-wide"  # the recipe's, as the method has none of its own


def test_the_help_names_what_is_new(tmp_path: Path) -> None:
    said = re.sub("[─-╿]", " ", with_toys(tmp_path, "train", "digits", "--help"))
    said = " ".join(said.split())
    assert "digits, cifar10, cifar100, omniglot, imagenet, folder or toys." in said
    assert "randaugment, trivialaugment, advaa, metaaugment or inverting." in said
    assert "or, for autoaugment, faa, pba and dada, also the name of a published policy" in said


def test_a_method_names_fields_of_a_recipe() -> None:
    known = {field.name for field in fields(Recipe)}
    assert known >= LEARNING
    for method in METHODS.values():
        assert known >= {method.crop, *method.options}


@pytest.mark.parametrize(
    ("system", "data", "per_class", "network"),
    [
        ("autoaugment", "cifar10", 400, "wrn-28-10"), ("autoaugment", "cifar100", 40, "wrn-28-10"),
        ("autoaugment", "imagenet", 50, "resnet-50"), ("autoaugment", "digits", 20, "small-cnn"),
        ("autoaugment", "omniglot", None, "wrn-28-10"), ("autoaugment", "folder", None, "resnet-50"),
        ("pba", "cifar10", 400, "wrn-40-2"), ("pba", "cifar100", 40, "wrn-40-2"), ("pba", "omniglot", 2, "wrn-40-2"),
        ("pba", "imagenet", None, "resnet-50"), ("pba", "digits", None, "small-cnn"),
        ("dada", "cifar10", 400, "wrn-40-2"), ("dada", "cifar100", 40, "wrn-40-2"),
        ("dada", "imagenet", 50, "resnet-50"), ("dada", "omniglot", None, "wrn-28-10"),
    ],
)  # fmt: skip
def test_what_a_search_makes_do_with(system: str, data: str, per_class: int | None, network: str) -> None:
    """By hand, from the papers; without a number it takes all images."""
    names = {"imagenet": "imagenet-resnet-50", "digits": "digits", "folder": "folder"}
    trial = SEARCHES[system].trial(RECIPES[names.get(data, f"{data}-wrn-28-10")]())
    assert (trial.per_class, trial.network) == (per_class, network)


# Below the program nobody knows what an argument is called on the command line. lab/training is yet to be freed of it.
FREE = sorted({*PACKAGE.rglob("*.py")} - {*(PACKAGE / "lab").rglob("*.py")}) + [
    file for room in ("data", "baselines") for file in sorted((PACKAGE / "lab" / room).glob("*.py"))
]
FLAGS = {flag(field.name) for kind in (Recipe, Place) for field in fields(kind)}


@pytest.mark.parametrize("file", FREE, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_flag_is_named_below_the_program(file: Path) -> None:
    texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    named = {found for text in texts if isinstance(text, str) for found in re.findall("--[a-z-]+", text)}
    assert not named & FLAGS
