"""Each number of each recipe against the paper's appendix, typed in here once more, and what no run can have."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from metaaugment.lab.data.catalog import DATASETS
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training.trainer import cosine
from metaaugment.networks import NETWORKS
from metaaugment.ops import SPACES

# -- the paper, by hand ----------------------------------------------------------------------------------------------

# "by SGD with a momentum 0.9": Nesterov's is named nowhere, and only ImageNet has warm-up, smoothing and clipping.
PLAIN = {
    "momentum": 0.9, "nesterov": False, "warmup_epochs": 0, "label_smoothing": 0.0, "clip": None, "copies": 1,
    "random_epochs": 0, "frozen_epochs": 0, "crop": 0,
}  # fmt: skip
CIFAR = {**PLAIN, "flip": True, "cutout": 16, "batch": 128}
# "The policy network is trained for the same number of iterations as the task network by SGD with a momentum 0.9 …"
POLICY = {
    "transfer": False, "policy_optimizer": "sgd", "policy_momentum": 0.9, "policy_weight_decay": 5e-4,
    "policy_batch": 128, "policy_lr": 1e-3, "policy_clip": None, "epsilon": 0.1, "every": 1, "lagged": False,
}  # fmt: skip
# "Shake-Shake … trained for 1,800 epochs by SGD with …"; nothing of the policy is learned.
SHAKE = {**CIFAR, "transfer": True, "epochs": 1800, "lr": 0.01}
PYRAMID = {**CIFAR, "transfer": True, "epochs": 1800, "network": "pyramidnet-272-a200"}
JOINT = {**CIFAR, **POLICY, "lr": 0.1, "weight_decay": 5e-4}
# "transformations are applied to training samples directly with no Cutout added"; the baseline has no augmentation.
OMNIGLOT = {**JOINT, "dataset": "omniglot", "epochs": 200, "window": 20, "flip": False, "cutout": 0, "baseline_crop": 0}
# "label smoothing with magnitude 0.1, and gradient clipping with magnitude 5"; warm-up "in the first 5 epochs"
IMAGENET = {
    "dataset": "imagenet", "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4, "warmup_epochs": 5,
    "label_smoothing": 0.1, "clip": 5, "flip": True, "crop": 0, "cutout": 0, "size": 224,
}  # fmt: skip

PAPER: dict[str, dict[str, Any]] = {
    "cifar10-wrn-28-10": {**JOINT, "dataset": "cifar10", "network": "wrn-28-10", "epochs": 600, "window": 50},
    "cifar10-wrn-40-2": {**JOINT, "dataset": "cifar10", "network": "wrn-40-2", "epochs": 600, "window": 50},
    "cifar10-shake-shake-26-2x96d": {
        **SHAKE, "dataset": "cifar10", "network": "shake-shake-26-2x96d", "weight_decay": 1e-3,
    },
    "cifar10-shake-shake-26-2x112d": {
        **SHAKE, "dataset": "cifar10", "network": "shake-shake-26-2x112d", "weight_decay": 1e-3,
    },
    "cifar10-pyramidnet": {**PYRAMID, "dataset": "cifar10", "lr": 0.1, "weight_decay": 1e-4},
    "cifar100-wrn-28-10": {**JOINT, "dataset": "cifar100", "network": "wrn-28-10", "epochs": 200, "window": 20},
    "cifar100-wrn-40-2": {**JOINT, "dataset": "cifar100", "network": "wrn-40-2", "epochs": 600, "window": 50},
    "cifar100-shake-shake-26-2x96d": {
        **SHAKE, "dataset": "cifar100", "network": "shake-shake-26-2x96d", "weight_decay": 2.5e-3,
    },
    "cifar100-pyramidnet": {**PYRAMID, "dataset": "cifar100", "lr": 0.05, "weight_decay": 5e-4},
    # Table 2: "Each training sample in a mini-batch is augmented by 4 transformations"
    "cifar10-wrn-28-10-mt": {
        **JOINT, "dataset": "cifar10", "network": "wrn-28-10", "epochs": 600, "window": 50, "copies": 4,
    },
    "cifar100-wrn-28-10-mt": {
        **JOINT, "dataset": "cifar100", "network": "wrn-28-10", "epochs": 200, "window": 20, "copies": 4,
    },
    "omniglot-wrn-28-10": {**OMNIGLOT, "network": "wrn-28-10"},
    "omniglot-wrn-40-2": {**OMNIGLOT, "network": "wrn-40-2"},
    "imagenet-resnet-50": {
        **POLICY, **IMAGENET, "network": "resnet-50", "epochs": 120, "random_epochs": 40, "frozen_epochs": 40,
        "batch": 1024, "copies": 4, "lr": 0.4, "warmup_lr": 0.08, "policy_batch": 2048, "policy_lr": 4e-3,
        "policy_clip": 5, "window": 20,
    },
    "imagenet-resnet-200": {
        **IMAGENET, "network": "resnet-200", "transfer": True, "epochs": 150, "batch": 512, "lr": 0.2,
    },
}  # fmt: skip

# What the tables report: number of the table, accuracy, and the baseline where the table has one; top-5 beside them.
TABLES = {
    "cifar10-wrn-28-10": (1, "97.76 ± 0.04", "96.1"),
    "cifar10-wrn-40-2": (1, "96.79 ± 0.06", "94.7"),
    "cifar10-shake-shake-26-2x96d": (1, "98.29 ± 0.03", "97.1"),
    "cifar10-shake-shake-26-2x112d": (1, "98.28 ± 0.01", "97.2"),
    "cifar10-pyramidnet": (1, "98.57 ± 0.02", "97.3"),
    "cifar100-wrn-28-10": (1, "83.79 ± 0.11", "81.2"),
    "cifar100-wrn-40-2": (1, "80.60 ± 0.16", "74.0"),
    "cifar100-shake-shake-26-2x96d": (1, "85.97 ± 0.09", "82.9"),
    "cifar100-pyramidnet": (1, "89.46 ± 0.11", "86.0"),
    "cifar10-wrn-28-10-mt": (2, "98.26 ± 0.02"),
    "cifar100-wrn-28-10-mt": (2, "85.21 ± 0.09"),
    "omniglot-wrn-28-10": (3, "89.61 ± 0.05", "87.89"),
    "omniglot-wrn-40-2": (3, "89.12 ± 0.10", "85.86"),
    "imagenet-resnet-50": (4, "79.74 ± 0.08", "94.64 ± 0.03", "76.3", "93.1"),
    "imagenet-resnet-200": (4, "81.43 ± 0.08", "95.52 ± 0.04", "78.5", "94.2"),
}
TRANSFERRED = [name for name, numbers in PAPER.items() if numbers["transfer"]]
FAST = [f"{name}-fast" for name in ("cifar10-wrn-40-2", "cifar100-wrn-40-2", "omniglot-wrn-28-10", "omniglot-wrn-40-2")]
OWN = ("digits", "folder", *FAST)


def recipe(name: str, **changes: Any) -> Recipe:
    return replace(RECIPES[name](), **changes)


def plain(**changes: Any) -> Recipe:
    """A recipe of 200 epochs that could start."""
    return replace(Recipe(name="mine", dataset="digits", network="small-cnn", epochs=200), **changes)


@pytest.mark.parametrize("name", PAPER)
def test_the_numbers_are_the_papers(name: str) -> None:
    found = {field: getattr(recipe(name), field) for field in PAPER[name]}
    assert found == PAPER[name]


def test_our_readings() -> None:
    """CIFAR's baseline has "horizontal flipping …, zero-padding and random cropping", but not by how many pixels.

    ResNet-200 has a batch of "512", where that of ResNet-50 is "1024 · 4"; and of "the same setting as that of
    ResNet-50 except" the learning rate, a warm-up that starts at a fifth of it.
    """
    for name in (name for name in PAPER if name.startswith("cifar")):
        assert (recipe(name).baseline_crop, recipe(name).crop) == (4, 0)
    assert recipe("imagenet-resnet-200").copies == 1
    assert [recipe(f"imagenet-resnet-{depth}").warmup_lr for depth in (50, 200)] == [0.08, 0.04]


def test_every_row_of_tables_1_to_4_has_a_recipe_and_nothing_else_has() -> None:
    assert set(RECIPES) == {*TABLES, *OWN}
    assert set(PAPER) == set(TABLES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_docstring_has_the_command_with_its_own_name(name: str) -> None:
    commands = re.findall(r"metaaugment train (\S+?)\.?(?=\s|$)", RECIPES[name].__doc__ or "")
    assert commands == [name]
    assert ("--policy FILE" in (RECIPES[name].__doc__ or "")) == (name in TRANSFERRED)


@pytest.mark.parametrize("name", TABLES)
def test_a_docstring_has_the_table_and_its_figures(name: str) -> None:
    doc, (table, *figures) = (RECIPES[name].__doc__ or "").split("Time:")[0], TABLES[name]
    assert re.findall(r"Table (\d)", doc) == [str(table)]
    # All its numbers with a point, each once and no other.
    assert sorted(re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", doc)) == sorted(figures)


@pytest.mark.parametrize("name", FAST)
def test_a_fast_recipe_is_the_papers_but_for_three_numbers(name: str) -> None:
    papers = recipe(name.removesuffix("-fast"))
    assert recipe(name) == replace(papers, name=name, lagged=True, every=8, policy_lr=8e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_names_exists_and_it_can_start(name: str) -> None:
    one = recipe(name)
    assert one.network in NETWORKS
    assert one.dataset in DATASETS
    assert one.space in SPACES
    assert one.method == "metaaugment"
    assert one.name == name
    if name not in TRANSFERRED:
        validity.check(one)


# -- transfer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRANSFERRED)
def test_a_transferred_row_asks_for_its_policy(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is trained under a policy .* --policy FILE"):
        validity.check(recipe(name))
    validity.check(recipe(name, policy=Path("policy.safetensors")))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"metaaugment"}))
@pytest.mark.parametrize("name", RECIPES)
def test_other_methods_need_no_policy(name: str, method: str) -> None:
    validity.check(recipe(name, method=method))


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_json_and_back(name: str) -> None:
    for one in (recipe(name), recipe(name, policy=Path("a/p.safetensors"), pretrained=Path("w"), per_class=3)):
        again = Recipe.from_json(json.loads(json.dumps(one.to_json())))
        assert again == one
        assert type(again.policy) is type(one.policy)


def test_fields_of_another_version() -> None:
    """A run goes on where the field meant nothing."""
    known = plain().to_json()
    assert Recipe.from_json({**known, "power": 1.0, "magnitude_bins": 1}) == plain()
    for wrong, sentence in (
        ({**known, "power": 4.0, "magnitude_bins": 1}, "unknown recipe field 'power'"),
        ({**known, "epoch": 3}, r"unknown recipe field 'epoch'; the fields are .*epochs"),
        ({name: value for name, value in known.items() if name != "network"}, "network"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Recipe.from_json(wrong)


# -- what no run can have --------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
COUNT, MANY, SIZE = (0, -1, 10**400), (-1, 10**400), (-0.1, NAN, INF, -INF)
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("epochs", "batch", "copies", "policy_batch", "window", "every"), COUNT),
    **dict.fromkeys(("warmup_epochs", "random_epochs", "frozen_epochs", "crop", "baseline_crop", "cutout"), MANY),
    "seed": MANY,
    **dict.fromkeys(("lr", "warmup_lr", "weight_decay", "policy_lr", "policy_weight_decay", "alpha"), SIZE),
    **dict.fromkeys(("momentum", "policy_momentum", "label_smoothing"), (*SIZE, 1, 1.5)),
    **dict.fromkeys(("clip", "policy_clip"), (0.0, -1.0, NAN)),
    **dict.fromkeys(("size", "per_class"), COUNT),
    "epsilon": (*SIZE, 1.001),
    "held_back": (*SIZE, 1.0),
    "white": (0, -1, 65_536, 10**400),
    "area_min": (*SIZE, 0.0, 1.001),
    "sharpness": (0.0, -1.0, 5.1, NAN),
    **dict.fromkeys(("method", "route"), ("nope", "")),
    **dict.fromkeys(("num_ops", "magnitude"), (3,)),  # of another method; test_baselines.py has the rest
}
# These are refused later or, of a file, not at all; and by another name than the flag's.
LATE: dict[str, Any] = {
    "dataset": "nope", "network": "nope", "space": "nope", "policy_optimizer": "nope", "held_back_from": "nope",
    "policy_schedule": "nope", "split_seed": -1,
    "policy_network": "nope", "extractor": "nope", "transformations": "nope",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), [*((field, value) for field, bad in IMPOSSIBLE.items() for value in bad), *LATE.items()]
)
def test_an_impossible_value_is_refused_by_its_flag(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^--{field.replace('_', '-')} is {re.escape(repr(value))}"):
        validity.check(plain(**{field: value}))


def test_every_field_that_can_be_wrong_was_tried() -> None:
    """All but switches, files, and the name that the program itself gives."""
    free = {"name", "policy", "pretrained", "nesterov", "lagged", "transfer", "flip", "learn_alpha", "real_alpha",
            "local_statistics"}  # fmt: skip
    assert {field.name for field in fields(Recipe)} == IMPOSSIBLE.keys() | LATE.keys() | free


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 1, "batch": 1, "copies": 1, "policy_batch": 1, "window": 1, "every": 1, "per_class": 1, "size": 1},
        {"lr": 0.0, "warmup_lr": 0.0, "weight_decay": 0.0, "policy_lr": 0.0, "policy_weight_decay": 0.0, "alpha": 0.0},
        {"momentum": 0.0, "policy_momentum": 0.0, "label_smoothing": 0.0, "epsilon": 0.0},
        {"momentum": 0.999, "policy_momentum": 0.999, "label_smoothing": 0.999, "epsilon": 1.0},
        {"clip": 1e-9, "policy_clip": 1e9, "warmup_epochs": 199},
        {"random_epochs": 100, "frozen_epochs": 99},
        {"area_min": 1e-9},
        {"area_min": 1.0},
        {"white": 1},
        {"white": 65_535},
        {"epochs": 1, "random_epochs": 0, "frozen_epochs": 0},
    ],
)
def test_the_last_possible_values_are_taken(changes: dict[str, Any]) -> None:
    validity.check(plain(**changes))


# Each is possible by itself.
TOGETHER: dict[str, tuple[Recipe, str]] = {
    "nothing held back": (
        plain(held_back_from="training"),
        "--held-back-from is training, but --held-back is 0; give a share",
    ),
    "warm-up to the end": (plain(epochs=5, warmup_epochs=5), "--warmup-epochs is 5; it must be less than --epochs, 5"),
    "Nesterov without momentum": (
        plain(nesterov=True, momentum=0.0),
        "--nesterov needs --momentum above 0, but it is 0; change one",
    ),
    "no epoch left to learn": (
        recipe("imagenet-resnet-50", epochs=80),
        r"--epochs is 80; it must be larger than .* --frozen-epochs \(40 \+ 40\)",
    ),
    "a near name": (
        plain(method="randaugmnt"),
        r"--method is 'randaugmnt' \(did you mean randaugment\?\); choose one of",
    ),
}


@pytest.mark.parametrize("kind", TOGETHER)
def test_what_is_impossible_together(kind: str) -> None:
    wrong, sentence = TOGETHER[kind]
    with pytest.raises(ValueError, match=sentence):
        validity.check(wrong)


def test_what_is_just_possible_together() -> None:
    """Phases leave an epoch to learn only where a policy is learned: other methods, and training under a policy file,
    have one phase."""
    validity.check(plain(held_back_from="training", held_back=0.2))
    validity.check(plain(nesterov=True))
    validity.check(recipe("imagenet-resnet-50", epochs=81))
    validity.check(recipe("imagenet-resnet-50", epochs=80, method="randaugment"))
    validity.check(recipe("imagenet-resnet-50", epochs=30, policy=Path("policy.safetensors")))


# -- the learning rate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "value"),
    # cos(π/4) = √½, cos(π/3) = ½
    [(0, 0.1), (150, 0.05 * (1 + 0.5**0.5)), (200, 0.075), (300, 0.05), (400, 0.025), (450, 0.05 * (1 - 0.5**0.5)),
     (600, 0)],
)  # fmt: skip
def test_cosine_by_hand(step: int, value: float) -> None:
    assert cosine(0.1, 600)(step) == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 0.01), (1, 0.02), (5, 0.06), (9, 0.1), (10, 0.11), (11, 0.055 * (1 + math.cos(math.pi / 90))), (55, 0.055),
     (100, 0)],
)  # fmt: skip
def test_warm_up_by_hand(step: int, value: float) -> None:
    """From 0.01 by a hundredth a step up to 0.11, which the tenth step has, then down over the 90 left."""
    assert cosine(0.11, 100, 10, 0.01)(step) == pytest.approx(value, abs=1e-15)
