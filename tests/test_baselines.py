"""Published policies: their counts, the arguments that each function gets, and how images draw from them."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance
from rich.console import Console

import metaaugment as ma
from metaaugment.lab import cli
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import (
    FoundPolicy,
    Function,
    Schedule,
    ScheduleSampler,
    Stage,
    SubPolicies,
    SubPolicySampler,
    Table,
)
from metaaugment.lab.baselines.rand_augment import RandAugmentSampler
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.experiment import prepare
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.run import train
from metaaugment.lab.report.policies import in_words
from metaaugment.ops import INDEX, OPS, find_space

QUIET = Console(quiet=True)
ENHANCE = ("Color", "Contrast", "Brightness", "Sharpness")
GEOMETRY = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")

# -- counts ----------------------------------------------------------------------------------------------------------

NUMBER_OF_SUB_POLICIES = {
    "autoaugment-cifar10": 25, "autoaugment-imagenet": 25, "autoaugment-svhn": 25,
    "faa-cifar10": 493, "faa-imagenet": 498, "faa-svhn": 497,
    "dada-cifar10": 25, "dada-cifar100": 25, "dada-imagenet": 25, "dada-svhn": 25,
}  # fmt: skip
LINES = {"pba-cifar": (16, 200), "pba-svhn": (13, 160)}


def test_the_published_policies_and_their_sizes() -> None:
    found = {name: published.find(name) for name in published.PUBLISHED}
    assert found.keys() == NUMBER_OF_SUB_POLICIES.keys() | LINES.keys()
    of_pairs = {name: len(policy.sub_policies) for name, policy in found.items() if isinstance(policy, SubPolicies)}
    assert of_pairs == NUMBER_OF_SUB_POLICIES


@pytest.mark.parametrize(("name", "lines", "epochs"), [(name, *numbers) for name, numbers in LINES.items()])
def test_number_of_lines_and_epochs_of_schedules(name: str, lines: int, epochs: int) -> None:
    file = Path(published.__file__).parent / "policies" / f"{name}.json"
    log = json.loads(file.read_text())["log"]
    assert len(log) == lines
    found = published.find(name)
    assert isinstance(found, Schedule)
    assert found.epochs == epochs
    # One stage between two changes, at the epochs that the trial which was taken over had reached.
    ends = list(itertools.accumulate(stage.epochs for stage in found.stages))
    assert ends == [*(line[3] for line in log), epochs]
    assert all(len(stage.functions) == 30 for stage in found.stages)
    # Nothing is done at first, and the last line's new policy is the last stage's: Rotate, in tenths and levels.
    assert all(function.probability == 0 for function in found.stages[0].functions)
    rotate = found.stages[-1].functions[0]
    assert (rotate.name, 10 * rotate.probability, rotate.level) == ("Rotate", log[-1][5][0], log[-1][5][1])


# -- arguments -------------------------------------------------------------------------------------------------------

# The released codes' own arithmetic, for images of 32 pixels. AutoAugment and PBA: level of 10, truncated where an
# argument is a whole number. Fast AutoAugment and DADA: low + level (high − low), geometry then mirrored by a coin.
AUTOAUGMENT: dict[str, Callable[[float], float]] = {
    "Rotate": lambda level: int(level * 30 / 10),
    "Posterize": lambda level: 4 - int(level * 4 / 10),
    "Solarize": lambda level: 256 - int(level * 256 / 10),
    **dict.fromkeys(ENHANCE, lambda level: level * 1.8 / 10 + 0.1),
    **dict.fromkeys(("ShearX", "ShearY"), lambda level: level * 0.3 / 10),
    **dict.fromkeys(("TranslateX", "TranslateY"), lambda level: int(level * 10 / 10)),
    "Cutout": lambda level: int(level * 20 / 10),
}


def side_of_a_rectangle(v: float) -> int:
    """Of what Fast AutoAugment draws: Pillow's rectangle from a whole number to that number plus v."""
    picture = Image.new("L", (64, 64))
    ImageDraw.Draw(picture).rectangle((20, 20, 20 + v, 20 + v), 255)
    return int((np.asarray(picture)[30 - 10] > 0).sum())


FAA: dict[str, Callable[[float], float]] = {
    "Rotate": lambda level: -30 + level * 60,
    "Posterize": lambda level: int(4 + level * 4),
    "Solarize": lambda level: level * 256,
    **dict.fromkeys(ENHANCE, lambda level: 0.1 + level * 1.8),
    **dict.fromkeys(("ShearX", "ShearY"), lambda level: -0.3 + level * 0.6),
    **dict.fromkeys(("TranslateX", "TranslateY"), lambda level: (-0.45 + level * 0.9) * 32),
    "Cutout": lambda level: side_of_a_rectangle(level * 0.2 * 32),
}
DEFINITION = {"autoaugment": AUTOAUGMENT, "pba": AUTOAUGMENT, "faa": FAA, "dada": FAA}


def arguments(policy: FoundPolicy, functions: list[Function], sign: int = 1) -> list[float]:
    """By the tables that samplers draw from."""
    table = Table(policy, functions)
    signs = torch.full((len(functions),), sign)
    return find_space(policy.space).arguments(table.functions, table.magnitudes, signs, 32, 32).tolist()


def functions_of(name: str) -> list[Function]:
    policy = published.find(name)
    if isinstance(policy, SubPolicies):
        return [function for pair in policy.sub_policies for function in pair]
    assert isinstance(policy, Schedule)
    return [function for stage in policy.stages for function in stage.functions]


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_arguments_are_those_of_the_systems_own_code(name: str) -> None:
    """All of them, not twenty: whole numbers to the bit, others to the last bits of float64."""
    policy, functions = published.find(name), [f for f in functions_of(name) if f.takes_level]
    definition = DEFINITION[policy.system]
    assert len(functions) >= 20
    for sign in (1, -1):
        for function, found in zip(functions, arguments(policy, functions, sign), strict=True):
            mirrored = sign if function.name in GEOMETRY else 1
            assert found == pytest.approx(mirrored * definition[function.name](function.level), rel=1e-12, abs=1e-12)
            if function.name in ("Posterize", "Cutout") or (
                policy.space == "autoaugment" and function.name == "Rotate"
            ):
                assert found == int(found)


def test_twenty_arguments_of_autoaugment_by_hand() -> None:
    """Its first ten sub-policies of CIFAR-10: (function, probability, argument)."""
    policy = published.find("autoaugment-cifar10")
    assert isinstance(policy, SubPolicies)
    functions = [function for pair in policy.sub_policies[:10] for function in pair]
    found = [
        (f.name, f.probability, pytest.approx(argument) if f.takes_level else None)
        for f, argument in zip(functions, arguments(policy, functions), strict=True)
    ]
    assert found == [
        ("Invert", 0.1, None), ("Contrast", 0.2, 1.18),
        ("Rotate", 0.7, 6), ("TranslateX", 0.3, 9),
        ("Sharpness", 0.8, 0.28), ("Sharpness", 0.9, 0.64),
        ("ShearY", 0.5, 0.24), ("TranslateY", 0.7, 9),
        ("AutoContrast", 0.5, None), ("Equalize", 0.9, None),
        ("ShearY", 0.2, 0.21), ("Posterize", 0.3, 2),
        ("Color", 0.4, 0.64), ("Brightness", 0.6, 1.36),
        ("Sharpness", 0.3, 1.72), ("Brightness", 0.7, 1.72),
        ("Equalize", 0.6, None), ("Equalize", 0.5, None),
        ("Contrast", 0.6, 1.36), ("Sharpness", 0.6, 1.0),
    ]  # fmt: skip


def test_a_truncated_level_does_not_fall_short() -> None:
    """int(4 + 4 · 0.75) is 7 bits, and 0.2 of 32 pixels at level 1 / 1.28 are 5 and one; in float32 it may be less."""
    functions = [Function("Posterize", 1.0, 0.75), Function("Cutout", 1.0, 0.78125), Function("Posterize", 1.0, 0.25)]
    assert arguments(published.find("faa-cifar10"), functions) == [7, 6, 5]
    magnitudes = Table(published.find("faa-cifar10"), [Function("Rotate", 1.0, 0.1)]).magnitudes
    assert magnitudes.dtype == torch.float64


def test_a_sub_policy_does_to_an_image_what_pillow_does() -> None:
    """AutoAugment's "Color 0.4 3, Brightness 0.6 7" with both applied."""
    pair = Function("Color", 1.0, 3), Function("Brightness", 1.0, 7)
    policy = SubPolicies("autoaugment", "mine", "autoaugment", 10, (pair,))
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    found = ma.apply(images, SubPolicySampler(policy).sample(4), policy.space)
    for image, result in zip(images, found, strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
        expected = ImageEnhance.Brightness(ImageEnhance.Color(pillow).enhance(0.64)).enhance(1.36)
        assert np.array_equal(np.asarray(expected), result.permute(1, 2, 0).numpy())


# -- draws -----------------------------------------------------------------------------------------------------------


def assert_distributed(found: Counter[Any], expected: dict[Any, float], n: int) -> None:
    """χ² six standard deviations above its mean, which one of ten million draws reaches; nothing that cannot be."""
    expected = {key: share for key, share in expected.items() if share > 0}
    assert found.keys() <= expected.keys()
    chi = sum((found[key] - n * share) ** 2 / (n * share) for key, share in expected.items())
    assert math.fsum(expected.values()) == pytest.approx(1)
    assert chi < len(expected) - 1 + 6 * (2 * (len(expected) - 1)) ** 0.5


def pairs(t: ma.Transformation) -> Counter[Any]:
    names = [op.name for op in OPS]
    return Counter((names[j], names[k]) for j, k in zip(t.first.tolist(), t.second.tolist(), strict=True))


def test_sub_policies_are_drawn_alike_and_functions_by_their_probabilities() -> None:
    rotate, color, shear = Function("Rotate", 0.25, 3), Function("Color", 0.5, 1), Function("ShearX", 1.0, 9)
    policy = SubPolicies("autoaugment", "mine", "autoaugment", 10, ((rotate, color), (shear, rotate)))
    n, identity = 40_000, "Identity"
    t = SubPolicySampler(policy).sample(n, torch.Generator().manual_seed(0))
    expected = {
        ("Rotate", "Color"): 0.5 * 0.25 * 0.5, ("Rotate", identity): 0.5 * 0.25 * 0.5,
        (identity, "Color"): 0.5 * 0.75 * 0.5, (identity, identity): 0.5 * 0.75 * 0.5,
        ("ShearX", "Rotate"): 0.5 * 0.25, ("ShearX", identity): 0.5 * 0.75,
    }  # fmt: skip
    assert_distributed(pairs(t), expected, n)
    levels = {"Rotate": 3, "Color": 1, "ShearX": 9}
    for place, functions in enumerate((t.first, t.second)):
        for name, level in levels.items():
            assert set(t.magnitudes[functions == INDEX[name], place].tolist()) <= {level}
    assert t.signs.double().mean().abs() < 0.02


def by_enumeration(stage: Stage) -> dict[tuple[str, str], float]:
    """PBA's loop: a count, a shuffled list, each function applied by its probability until the count is reached."""
    shares: dict[tuple[str, str], float] = {}
    orders = list(itertools.permutations(stage.functions))
    for count, chance in enumerate((0.2, 0.3, 0.5)):
        for order in orders:
            for coins in itertools.product((True, False), repeat=len(order)):
                weight = chance / len(orders)
                for function, coin in zip(order, coins, strict=True):
                    weight *= function.probability if coin else 1 - function.probability
                applied = [f.name for f, coin in zip(order, coins, strict=True) if coin][:count]
                key = tuple((applied + ["Identity"] * 2)[:2])
                shares[key] = shares.get(key, 0.0) + weight
    return shares


def test_a_schedule_draws_as_pbas_loop_does() -> None:
    functions = Function("Rotate", 0.3, 3), Function("Color", 0.8, 1), Function("ShearX", 0.0, 2), Function("Invert", 1)
    stage = Stage(5, functions)
    sampler = ScheduleSampler(Schedule("pba", "mine", "autoaugment", 10, (stage,)), 5)
    n = 60_000
    t = sampler.sample(n, torch.Generator().manual_seed(0))
    assert_distributed(pairs(t), by_enumeration(stage), n)
    assert set(t.magnitudes[t.second == INDEX["Rotate"], 1].tolist()) == {3}


@pytest.mark.parametrize(("epochs", "firsts"), [(8, [0, 2, 6]), (4, [0, 1, 3]), (16, [0, 4, 12]), (3, [0, 1, 3])])
def test_a_schedule_is_stretched_to_the_length_of_a_run(epochs: int, firsts: list[int]) -> None:
    """Stages of 2, 4 and 2 epochs: a run of 16 has 4, 8 and 4, one of 4 has 1, 2 and 1; of 3 the last is left out."""
    stages = tuple(
        Stage(number, (Function("Rotate", 1.0, level), Function("Color", 1.0, 0)))
        for number, level in ((2, 1), (4, 2), (2, 3))
    )
    sampler = ScheduleSampler(Schedule("pba", "mine", "autoaugment", 10, stages), epochs)
    seen = []
    for _ in range(epochs):
        t = sampler.sample(50)
        seen.append(max(t.magnitudes[t.first == INDEX["Rotate"], 0].tolist()))
        sampler.update()
    assert seen == [sum(first <= epoch for first in firsts) for epoch in range(epochs)]
    sampler.sample(5)  # behind the end, as after the last epoch


def test_a_schedule_goes_on_from_its_state() -> None:
    schedule = published.find("pba-svhn")
    assert isinstance(schedule, Schedule)
    one, other = (ScheduleSampler(schedule, 160) for _ in range(2))
    for _ in range(70):
        one.update()
    other.load_state_dict(one.state_dict())
    for _ in range(3):
        drawn = [sampler.sample(40, torch.Generator().manual_seed(3)) for sampler in (one, other)]
        assert torch.equal(drawn[0].first, drawn[1].first)
        assert torch.equal(drawn[0].magnitudes, drawn[1].magnitudes)
        one.update()
        other.update()


# -- RandAugment as published ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("functions", [1, 2])
def test_randaugment_at_one_magnitude(functions: int) -> None:
    t = RandAugmentSampler(7.5, functions).sample(14 * 400, torch.Generator().manual_seed(0))
    names = [op.name for op in ma.PAPER_OPS]
    shares = dict.fromkeys(names, 1 / 14)
    assert_distributed(Counter(names[j] for j in t.first.tolist()), shares, len(t))
    second = Counter(names[j] for j in t.second.tolist())
    if functions == 1:
        assert set(second) == {"Identity"}
    else:
        assert_distributed(second, shares, len(t))
    assert t.magnitudes.unique().tolist() == [7.5]


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_num_ops_functions_are_applied(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Invert as the only function there is, an odd number of them inverts, an even one does nothing."""
    invert = INDEX["Invert"]

    def only_invert(self: RandAugmentSampler, n: int, generator: Any = None) -> ma.Transformation:
        first = torch.full((n,), invert)
        second = first if self.functions == 2 else torch.full((n,), INDEX["Identity"])
        return ma.Transformation.draw(first, second, generator)

    monkeypatch.setattr(RandAugmentSampler, "sample", only_invert)
    recipe = replace(RECIPES["digits"](), method="randaugment", num_ops=number, magnitude=5.0)
    experiment = prepare(recipe, Place(device="cpu"), QUIET)
    learner, _ = experiment.phases()[0].begin(None)
    images, labels = experiment.data.train.images[:8], experiment.data.train.labels[:8]  # type: ignore[union-attr]
    seen = learner.observe(images, labels)
    assert torch.equal(seen.images, 255 - images if number % 2 else images)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_ops": 2}, "--num-ops is 2, but --magnitude is missing; give both, or neither"),
        ({"magnitude": 3.0}, "--magnitude is 3.0, but --num-ops is missing; give both, or neither"),
        ({"num_ops": 0, "magnitude": 3.0}, "--num-ops is 0; it must be 1 to 16"),
        ({"num_ops": 2, "magnitude": 14.0}, "--magnitude is 14.0; it must be 0 to 10"),
        ({"num_ops": 2, "magnitude": 3.0, "method": "faa"}, "--num-ops is 2; it must be left out for --method faa"),
    ],
)
def test_what_randaugment_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        validity.check(replace(RECIPES["digits"](), **{"method": "randaugment", **changes}))


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_digits_by_the_same_trainer(method: str, tmp_path: Path) -> None:
    """And what a result says was in force."""
    recipe = replace(RECIPES["digits"](), method=method, epochs=2, per_class=10)
    result = train(recipe, Place(out=tmp_path / "run", device="cpu"), QUIET)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert result["method"] == method
    in_force = {"advaa": (None, "autoaugment", 8), "faa": ("faa-svhn", "faa", 1)}
    found = result["policy"], result["space"], result["copies"]
    assert found == in_force.get(method, found)
    assert all(row["skipped"] == 0 and math.isfinite(row["train_loss"]) for row in rows)
    assert rows[0]["images_per_second"] > 0


@pytest.mark.parametrize(
    ("system", "data", "name"),
    [
        ("autoaugment", "cifar10", "autoaugment-cifar10"), ("autoaugment", "cifar100", "autoaugment-cifar10"),
        ("autoaugment", "imagenet", "autoaugment-imagenet"), ("autoaugment", "omniglot", "autoaugment-svhn"),
        ("faa", "digits", "faa-svhn"), ("faa", "folder", "faa-imagenet"), ("faa", "cifar100", "faa-cifar10"),
        ("pba", "cifar100", "pba-cifar"), ("pba", "imagenet", "pba-cifar"), ("pba", "omniglot", "pba-svhn"),
        ("dada", "cifar100", "dada-cifar100"), ("dada", "imagenet", "dada-imagenet"), ("dada", "digits", "dada-svhn"),
    ],
)  # fmt: skip
def test_which_policy_fits_which_data(system: str, data: str, name: str) -> None:
    assert published.fitting(system, data) == name


def test_functions_without_an_embedding_are_refused_only_by_a_policy_that_looks_at_it() -> None:
    policy = SubPolicies("faa", "mine", "faa", 1, ((Function("Invert", 1.0), Function("Cutout", 1.0, 0.5)),))
    images, labels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8), torch.arange(4)
    net = ma.network("small-cnn", 4)
    seen = ma.Learner(net, SubPolicySampler(policy), ma.UniformPolicy(), space="faa").observe(images, labels)
    assert seen.weights.tolist() == [0.25] * 4
    seen = ma.Learner(net, SubPolicySampler(policy), ma.FeaturePolicy(128), space="faa").observe(images, labels)
    assert len(set(seen.weights.tolist())) == 4
    with pytest.raises(ValueError, match="the embedding has no place for function index 14"):
        ma.Learner(net, SubPolicySampler(policy), ma.PolicyNetwork(128), space="faa").observe(images, labels)


# -- files -----------------------------------------------------------------------------------------------------------


def plain(**changes: Any) -> dict[str, Any]:
    pair = [["Rotate", 0.5, 3], ["Invert", 0.1, None]]
    return {
        "system": "autoaugment", "source": "me", "space": "autoaugment", "max_level": 10, "sub_policies": [pair],
        **changes,
    }  # fmt: skip


def logged(**changes: Any) -> dict[str, Any]:
    values = plain(system="pba", epochs=9, operations=["Rotate", "Color"], log=[["1", "0", 3, 4, [0] * 4, [1] * 4]])
    del values["sub_policies"]
    return {**values, **changes}


@pytest.mark.parametrize("name", published.PUBLISHED)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    policy = published.find(name)
    published.write(policy, tmp_path / "copy.json", search={"cost": 3})
    assert published.find(tmp_path / "copy.json") == policy


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (plain(sub_policies=[[["Rotat", 0.5, 3], ["Invert", 0.1, None]]]), "unknown function 'Rotat'; choose one of"),
        (plain(sub_policies=[[["Rotate", 1.5, 3], ["Invert", 0.1, None]]]), "Rotate has the probability 1.5; it must"),
        (plain(sub_policies=[[["Rotate", -0.1, 3], ["Invert", 0.1, None]]]), "Rotate has the probability -0.1"),
        (plain(sub_policies=[[["Rotate", math.nan, 3], ["Invert", 0.1, None]]]), "Rotate has the probability nan"),
        (plain(sub_policies=[[["Rotate", 0.5, 11], ["Invert", 0.1, None]]]), "Rotate has the level 11; it must"),
        (plain(sub_policies=[[["Rotate", 0.5, "3"], ["Invert", 0.1, None]]]), "'3' is not a number of at most 1e9"),
        (plain(sub_policies=[[["Rotate", 0.5, None], ["Invert", 0.1, None]]]), "Rotate has no level; it needs one"),
        (plain(sub_policies=[[["Rotate", 10**400, 3], ["Invert", 0.1, None]]]), "is not a number of at most 1e9"),
        (plain(sub_policies=[[["Rotate", 0.5, 10**400], ["Invert", 0.1, None]]]), "is not a number of at most 1e9"),
        (plain(sub_policies=[[["Rotate", 0.5, 3]]]), "must be a list of two functions"),
        (plain(sub_policies=[["Rotate", "Invert"]]), "must be a list of its name, probability and level"),
        (plain(sub_policies=[]), "its list of sub-policies is empty"),
        (plain(sub_policies={}), "its sub_policies is {}, which is not a valid value"),
        (plain(system="mine"), "its system is 'mine'; choose one of autoaugment, faa, pba, dada"),
        (plain(space="mine"), "its space is 'mine'; choose one of"),
        (plain(max_level=0), "its max_level is 0; it must be above 0"),
        ({"source": "me"}, "its system is missing"),
        (logged(epochs=0), "its schedule has 0 epochs; there must be at least one"),
        (logged(log=[]), "its log is empty"),
        (logged(log=[["1", "0", 3, 4, [0] * 4]]), "it must have six entries"),
        (logged(log=[["1", "0", 3, 4, [0] * 4, [1] * 3]]), "it must have two numbers for each function"),
        (logged(log=[["1", "0", 3, 12, [0] * 4, [1] * 4]]), "they must not decrease"),
        (logged(log=[["1", "0", 3, 4.5, [0] * 4, [1] * 4]]), "they must be whole numbers"),
        (logged(operations=[]), "it must have two numbers for each function"),
        (logged(log=[["1", "0", 3, 4, [0] * 4, [11, 0, 0, 0]]]), "Rotate has the probability 1.1"),
        (
            logged(log=[["1", "0", 3, 4, [0] * 4, [1] * 4], ["2", "3", 5, 5, [1] * 4, [2] * 4]]),
            "its log has a gap: trial 3 follows a line about trial 1",
        ),
    ],
)  # fmt: skip
def test_a_damaged_policy_is_refused_by_name(values: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"policy.json: .*{sentence}"):
        published.find(file)


@pytest.mark.parametrize("content", ["", "[1, 2]", "no json", "\x00\xff", "[" * 100_000])
def test_a_file_that_is_no_policy(content: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"policy.json is not a policy of a compared system"):
        published.find(file)


def test_a_policy_of_a_system_needs_its_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(plain()))
    policy = published.find(file)
    assert isinstance(policy, SubPolicies)
    assert policy.sub_policies == ((Function("Rotate", 0.5, 3), Function("Invert", 0.1)),)
    for name, system, method in (
        (str(file), "autoaugment", "metaaugment"), ("faa-svhn", "faa", "metaaugment"), ("pba-svhn", "pba", "faa"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"is a policy of {system}; use --method {system}"):
            prepare(replace(RECIPES["digits"](), method=method, policy=Path(name)), Place(device="cpu"), QUIET)
    with pytest.raises(SystemExit):
        cli.main(["inspect", str(file)])
    assert f"is a policy of autoaugment; metaaugment ops --policy {file} says what it does" in capsys.readouterr().err


def test_a_run_does_not_go_on_under_another_policy_of_the_same_name(tmp_path: Path) -> None:
    file, place = tmp_path / "mine.json", Place(out=tmp_path / "run", device="cpu")
    file.write_text(json.dumps(plain()))
    recipe = replace(RECIPES["digits"](), method="autoaugment", policy=file, epochs=1, per_class=10)
    result = train(recipe, place, QUIET)
    assert (result["policy"], result["space"], result["copies"]) == (str(file), "autoaugment", 1)
    (tmp_path / "run" / "result.json").unlink()  # as if it had been stopped before the test
    file.write_text(json.dumps(plain(sub_policies=[[["Color", 0.5, 3], ["Invert", 0.1, None]]])))
    with pytest.raises(ValueError, match="its policy_sha256 is"):
        train(recipe, Place(resume=tmp_path / "run", device="cpu"), QUIET)
    file.write_text(json.dumps(plain()))
    assert (
        train(recipe, Place(resume=tmp_path / "run", device="cpu"), QUIET)["test_accuracy"] == result["test_accuracy"]
    )


@pytest.mark.parametrize("method", ["baseline", "randaugment", "trivialaugment", "advaa"])
def test_methods_that_use_no_policy_refuse_one(method: str) -> None:
    with pytest.raises(ValueError, match=f"which --method {method} does not use"):
        validity.check(replace(RECIPES["digits"](), method=method, policy=Path("faa-svhn")))


# -- in words --------------------------------------------------------------------------------------------------------


def test_policies_in_words() -> None:
    lines = list(in_words("autoaugment-cifar10", 32))
    assert len(lines) == 2 + 25
    assert lines[2].strip() == "1. invert (10 %), then contrast × 1.18 (20 %)"
    assert lines[3].strip() == "2. rotate by ± 6 degrees (70 %), then move sideways by ± 9 pixels (30 %)"
    assert list(in_words("autoaugment-cifar10", 64))[3].strip().endswith("move sideways by ± 18 pixels (30 %)")
    lines = list(in_words("pba-svhn", 32))
    assert len(lines) == 2 + 14
    assert lines[2] == "epochs 1 to 9: nothing"
    assert lines[3].startswith("epochs 10 to 24: move sideways by ± 3 pixels (10 %); move up or down by ± 3 pixels")


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["autoaugment", "faa", "pba", "dada", "advaa", "randaugment"])
def test_captured_training_by_each_method(method: str, tmp_path: Path) -> None:
    """Tables live on the device and change in place from epoch to epoch."""
    changes = {"num_ops": 3, "magnitude": 9.0} if method == "randaugment" else {}
    recipe = replace(RECIPES["digits"](), method=method, epochs=3, per_class=20, **changes)
    result = train(recipe, Place(out=tmp_path / "run", device="cuda"), QUIET)
    assert math.isfinite(result["test_loss"])
