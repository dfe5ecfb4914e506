"""A learned policy as one file: whole or refused, the same when it is read, and what the paper trains others by."""

import copy
import json
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import metaaugment as ma
from metaaugment.files import sealed
from metaaugment.guard.faults import full_memory
from metaaugment.lab.report.policies import learned_in_words
from metaaugment.learned import file as policy_file
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learned.source import space_hash
from metaaugment.networks import NETWORKS
from metaaugment.ops import SPACES, Level, Space
from metaaugment.policy import build, exponential
from metaaugment.sampler import FixedSampler

from processes import together
from small import CLASSES, FILL, LABELS, MEAN, SIDE, STD, N, photos, prepare, sharp, trained

PROVENANCE = {"recipe": "digits", "test_accuracy": 0.97, "versions": {"torch": "2.13"}, "seeds": [1, 2]}


def export(learner: ma.Learner, network: str | None = "small-cnn", channels: int = 3) -> LearnedPolicy:
    return LearnedPolicy.from_learner(learner, network, CLASSES, MEAN[:channels], STD[:channels], SIDE, PROVENANCE)


@cache
def learned(channels: int = 3, policy: nn.Module | None = None) -> LearnedPolicy:
    """One that several tests look at; none changes it."""
    torch.manual_seed(0)
    return export(trained(None, policy, channels), channels=channels)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def theta(policy: LearnedPolicy) -> Any:
    return policy.modules[0]


def w(policy: LearnedPolicy) -> Any:
    return policy.modules[1]


def tensors(policy: LearnedPolicy) -> dict[str, Tensor]:
    found = {"p": policy.probabilities}
    if policy.modules:
        found |= {f"theta/{name}": value for name, value in theta(policy).state_dict().items()}
        found |= {f"w/{name}": value for name, value in w(policy).state_dict().items()}
    return found


def same(left: LearnedPolicy, right: LearnedPolicy) -> bool:
    """Bit for bit, and in everything else."""
    a, b = tensors(left), tensors(right)
    equal = a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
    return equal and left.source == right.source and left.provenance == right.provenance


# -- the file ---------------------------------------------------------------------------------------------------------


POLICIES = {
    "policy network": lambda: ma.PolicyNetwork(128, hidden=30),
    "feature policy": lambda: ma.FeaturePolicy(128),
    "rejecting": lambda: ma.RejectingPolicy(ma.PolicyNetwork(128)),
    "rejecting feature policy": lambda: ma.RejectingPolicy(ma.FeaturePolicy(128)),
    "clue policy": lambda: ma.CluePolicy(128, head=exponential),
    "label policy": lambda: ma.LabelPolicy(128, hidden=30, num_classes=CLASSES),
    "regressing": lambda: ma.RegressingPolicy(
        ma.LabelPolicy(128, head=exponential, num_classes=CLASSES), sharpness=0.7
    ),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_round_trip_is_bit_exact(tmp_path: Path, kind: str) -> None:
    policy = learned(policy=POLICIES[kind]())
    policy.save(tmp_path / "policy.safetensors")
    loaded = LearnedPolicy.load(str(tmp_path / "policy.safetensors"))
    assert same(loaded, policy)
    assert loaded.provenance == PROVENANCE
    labels = LABELS
    for left, right in zip(
        policy.augment(photos(), labels, seeded()), loaded.augment(photos(), labels, seeded()), strict=True
    ):
        assert torch.equal(left, right)


def test_a_policy_that_looks_at_labels_asks_for_them_and_draws_nothing() -> None:
    policy, labels = learned(policy=POLICIES["label policy"]()), LABELS
    assert policy.needs_labels
    assert not learned().needs_labels
    generator = seeded()
    for wrong, sentence in {
        None: rf"looks at labels, but got none for {N} images.*augment\(images, labels\)",
        labels[:2]: r"got torch.int64 \(2,\) for",
        labels / 2: r"got torch.float32 \(12,\) for",
        labels + 3: f"a label is {CLASSES + 2}, but the policy knows {CLASSES} classes",
        torch.Generator(): "labels is a Generator; give a torch tensor, or pass it as generator=",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            policy.augment(photos(), wrong, generator)  # type: ignore[arg-type]
    assert torch.equal(generator.get_state(), seeded().get_state())
    assert policy.sampler_only().augment(photos())[1].tolist() == [pytest.approx(1 / N)] * N
    images, weights = policy.augment(photos(), labels, seeded())
    other = policy.augment(photos(), (labels + 1) % CLASSES, seeded())
    assert torch.equal(images, other[0])
    assert not torch.allclose(weights, other[1])


def test_what_a_policy_with_clues_makes_of_an_image_by_hand() -> None:
    policy, labels = learned(policy=POLICIES["clue policy"]()), LABELS
    images, weights = policy.augment(photos(), labels, seeded())
    t = policy.sample(N, seeded())
    kept: list[Tensor] = []
    network = w(policy)
    last = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        p = network(prepare()(images)).double().softmax(1)
    hook.remove()
    own = p[torch.arange(N), labels]
    clues = torch.stack([(1 - own.log()).log(), own, -(p * p.log()).sum(1) / torch.tensor(CLASSES).log()], 1)
    outputs = theta(policy)(kept[0], ma.embed(t), clues.float())
    torch.testing.assert_close(weights, outputs / outputs.sum(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["clue policy", "regressing"])
def test_a_learner_under_it_weighs_as_it_does_alone(kind: str) -> None:
    policy, labels = learned(policy=POLICIES[kind]()), LABELS
    sampler, frozen, extractor = policy.parts(MEAN, STD)
    learner = ma.Learner(
        ma.network("small-cnn", CLASSES),
        sampler,
        frozen,
        extractor=extractor,
        space=policy.space,
        fill=FILL,
        prepare=prepare(),
    )
    seen = learner.observe(photos(), labels)
    torch.testing.assert_close(seen.weights, policy.weights(seen.images, seen.transformation, labels))


def test_loading_draws_no_random_number_and_depends_on_the_file_no_longer(tmp_path: Path) -> None:
    policy, file = learned(), tmp_path / "policy.safetensors"
    policy.save(file)
    before = torch.get_rng_state()
    loaded = LearnedPolicy.load(file)
    assert torch.equal(torch.get_rng_state(), before)
    with file.open("rb+") as content:  # in place, as cp does it
        content.write(bytes(file.stat().st_size))
    assert same(loaded, policy)


def test_the_copy_does_not_follow_the_learner() -> None:
    learner = trained()
    policy = export(learner)
    before = {name: value.clone() for name, value in tensors(policy).items()}
    with torch.no_grad():
        for value in (*learner.network.parameters(), *learner.policy.parameters(), learner.sampler.probabilities):
            value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in tensors(policy).items())


def test_flipped_bytes_and_cut_ends_are_refused(tmp_path: Path) -> None:
    """A bit anywhere, in lengths, names, state and numbers alike; and a file cut off or continued anywhere."""
    policy, file = learned(), tmp_path / "policy.safetensors"
    policy.save(file)
    intact = file.read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    draw = random.Random(0)
    places = [*range(12), *draw.choices(range(header), k=120), *draw.choices(range(len(intact)), k=60)]
    mutated = []
    for place in places:
        content = bytearray(intact)
        content[place] ^= 1 << draw.randrange(8)
        mutated.append(bytes(content))
    ends = (0, 1, 7, 8, 9, header - 1, header, header + 1, len(intact) // 2, len(intact) - 1)
    mutated += [intact[:end] for end in ends]
    mutated += [intact + b"\0", b"\0" * len(intact), intact[8:], intact * 2]
    for content in mutated:
        file.write_bytes(content)
        with pytest.raises(ValueError) as error:
            LearnedPolicy.load(file)
        assert str(error.value).startswith(str(file))


def edited(file: Path, **fields: Any) -> None:
    """The file with other fields, or other tensors where a name has a slash; under a right SHA-256."""
    tree = sealed.load(file, "policy")
    for path, value in fields.items():
        *groups, name = path.split("/")
        place = tree
        for group in groups:
            place = place[group]
        if value is None:
            del place[name]
        else:
            place[name] = value(place.get(name)) if callable(value) else value
    sealed.save(file, "policy", tree)


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[1] = value
        return tensor

    return spoil


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"format": 2}, r"it has format 2, but this version of metaaugment reads 1; use the version"),
    "a format that is true": ({"format": True}, r"it has format True, but this version of metaaugment reads 1"),
    "no version": ({"format": None}, r"does not say its format; restore an intact copy"),
    "a field is missing": ({"mean": None}, r"the field 'mean' is missing; restore an intact copy of it, or export"),
    "a tensor of w is missing": ({"w/body.0.weight": None}, r"the tensor w/body\.0\.weight is missing"),
    "a tensor of θ is missing": ({"theta/output.bias": None}, r"the tensor theta/output\.bias is missing"),
    "θ's size is missing": ({"theta/feature.weight": None}, r"feature\.weight of the policy is missing"),
    "an unknown tensor": ({"w/neck.weight": torch.ones(3)}, r"the tensor w/neck\.weight has no place"),
    "another shape": ({"w/output.weight": torch.ones(5, 7)}, r"w/output\.weight is \(5, 7\); it must be \(5, 128\)"),
    "another dtype": ({"w/output.weight": lambda w: w.long()}, r"has dtype torch\.int64; it must be torch\.float32"),
    "a number for a tensor": ({"w/output.bias": 3}, r"the tensor w/output\.bias is missing"),
    "NaN in w": ({"w/body.4.weight": spoiled(float("nan"))}, r"w/body\.4\.weight holds numbers that are not finite"),
    "infinity in θ": ({"theta/output.weight": spoiled(float("inf"))}, r"theta/output\.weight holds numbers that"),
    "NaN in p": ({"p": spoiled(float("nan"))}, r"p is not a distribution"),
    "p below 0": ({"p": lambda p: spoiled(-float(p.view(-1)[1]))(p)}, r"p is not a distribution: it ranges from -"),
    "p does not sum to 1": ({"p": lambda p: p * 1.01}, r"p is not a distribution: .* sums to 1\.01; it must"),
    "p of other functions": ({"p": torch.full((16, 16), 1 / 256).double()}, r"p is torch\.float64 \(16, 16\)"),
    "p in float32": ({"p": lambda p: p.float()}, r"p is torch\.float32 \(14, 14\); it must be torch\.float64"),
    "p is no tensor": ({"p": [1.0]}, r"p is list"),
    "an unknown network": ({"network": "vgg-16"}, r"unknown network 'vgg-16'; pass it .*, or use .*small-cnn"),
    "a table for a network": ({"network": {"name": "small-cnn"}}, r"is not an intact policy"),
    "another network": ({"network": "wrn-40-2"}, r"the tensor w/stem\.weight is missing"),
    "other classes": ({"num_classes": 6}, r"w/output\.weight is \(5, 128\); it must be \(6, 128\)"),
    "very many classes": ({"num_classes": 2**62}, r"is not an intact policy"),
    "still more": ({"num_classes": 2**80}, r"is not an intact policy"),
    "classes in words": ({"num_classes": "five"}, r"num_classes is 'five'; it must be a whole number of at least 2"),
    "other channels": ({"channels": 1}, r"mean is .*; for 1 channels it needs 1 numbers"),
    "no channels": ({"channels": []}, r"is not an intact policy"),
    "an unknown policy": ({"policy": "oracle"}, r"unknown policy 'oracle'; this version of metaaugment has policy-net"),
    "another policy": ({"policy": "feature-policy"}, r"theta/output\.weight is \(1, 200\); it must be \(1, 100\)"),
    "θ without a name": ({"policy": lambda _: None}, r"it has the tensors of a policy, but does not name it"),
    "a policy for other features": (
        {"theta/feature.weight": lambda w: w[:, :64].contiguous()},
        r"features have 128 numbers, but the policy takes 64",
    ),
    "an unknown space": ({"space/name": "aside"}, r"unknown space 'aside'; pass it with space="),
    "another space": ({"space/name": "autoaugment"}, r"magnitudes meant something else .* use the version"),
    "another hash": ({"space/sha256": "0" * 64}, r"magnitudes meant something else when it was learned"),
    "no space": ({"space": 3}, r"is not an intact policy"),
    "a deviation of 0": ({"std": [0.2, 0.0, 0.3]}, r"std is .*; each number must be above 0"),
    "a mean in words": ({"mean": ["a", "b", "c"]}, r"both must be finite numbers"),
    "a fill above 255": ({"fill": [0, 0, 256]}, r"fill is 256; it must be a whole number from 0 to 255"),
    "no size": ({"size": []}, r"size is \(\); it must be a height and a width"),
    "an unknown layer": ({"layer": "neck"}, r"features='neck' is not a layer of the network"),
    "a number for a layer": ({"layer": 3}, r"layer is 3; it must be a name, or none"),
    "a list for provenance": ({"provenance": [1]}, r"the provenance must be a dictionary"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_under_a_right_hash_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    file, (fields, sentence) = tmp_path / "policy.safetensors", WRONG[kind]
    learned().save(file)
    edited(file, **fields)
    with pytest.raises(ValueError, match=sentence) as error:
        LearnedPolicy.load(file)
    assert str(error.value).startswith(str(file))
    assert "\n" not in str(error.value)


def test_what_is_no_policy_is_refused_by_name(tmp_path: Path) -> None:
    """An intact file of another kind is not to be restored."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "empty").touch()
    sealed.save(tmp_path / "checkpoint", "checkpoint", {"epoch": 1})
    save_file({"p": torch.ones(14, 14)}, tmp_path / "network")
    state = json.dumps({"kind": "policy", "tree": {"format": 1, "p": {"tensor": "p"}}})
    save_file({}, tmp_path / "without p", {"state": state, "sha256": sealed._digest({}, state)})
    for name, what in {
        "missing": "cannot be read", "a folder": "cannot be read", "empty": "", "without p": "is not an intact policy",
        "checkpoint": "is a checkpoint file, not a policy file.*; name a policy file; metaaugment export",
        "network": "is not a policy file.*; name a policy file; metaaugment export",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{tmp_path / name} {what}"):
            LearnedPolicy.load(tmp_path / name)


def no_memory_of_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


# On the CPU in the words of the installed torch and of Python: more than any machine has is asked for.
FULL = {
    "the CPU's": lambda: torch.empty(2**60, dtype=torch.uint8),
    "a GPU's": no_memory_of_a_gpu,
    "Python's": lambda: bytearray(2**62),
}


@pytest.mark.parametrize("fails", FULL.values(), ids=FULL)
@pytest.mark.parametrize("where", ["metaaugment.learned.file.deepcopy", "metaaugment.learned.file._fitted"])
def test_full_memory_says_nothing_of_the_file(
    where: str, fails: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a copy of the user's own network, or of the file's tensors, does not fit beside what is there."""
    file = tmp_path / "policy.safetensors"
    export(trained(Own(), ma.PolicyNetwork(8)), None).save(file)
    monkeypatch.setattr(where, lambda *_: fails())
    with pytest.raises((RuntimeError, MemoryError)) as error:
        LearnedPolicy.load(file, extractor=Own())
    assert full_memory(error.value)


@pytest.mark.parametrize("fails", FULL.values(), ids=FULL)
def test_full_memory_says_nothing_of_the_images(fails: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = learned()
    assert policy.extractor is not None
    monkeypatch.setattr(policy.extractor.network, "forward", lambda inputs: fails())
    with pytest.raises((RuntimeError, MemoryError)) as error:
        policy.augment(photos())
    assert full_memory(error.value)


def test_words_of_full_memory_in_a_file_are_not_full_memory(tmp_path: Path) -> None:
    learned().save(tmp_path / "policy.safetensors")
    with pytest.raises(sealed.Damaged), policy_file.reading(tmp_path / "policy.safetensors"):
        raise KeyError("DefaultCPUAllocator: can't allocate memory")


class Payload:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_refused_and_nothing_in_it_runs(tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(mark)))
    torch.save(Payload(mark), tmp_path / "torch.pt")
    for file in tmp_path.glob("*.pt"):
        with pytest.raises(ValueError, match=re.escape(str(file))):
            LearnedPolicy.load(file)
    assert not mark.exists()


def test_the_document_reads_a_file_with_safetensors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code runs as it stands there, and it names every field and group of tensors of a file."""
    monkeypatch.chdir(tmp_path)
    policy = learned()
    policy.save("policy.safetensors")
    text = (Path(__file__).parent.parent / "docs" / "policy-file.md").read_text()
    read, *_ = re.findall(r"^```python\n(import json\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    exec(compile(read, "policy-file.md", "exec"), found)
    assert torch.equal(found["p"], policy.probabilities)
    assert found["fields"]["provenance"] == PROVENANCE
    assert found["w"].keys() == w(policy).state_dict().keys()
    assert all(f"`{field}`" in text for field in found["fields"])


def test_half_precision_changes_outputs_little(tmp_path: Path) -> None:
    policy, file = learned(), tmp_path / "policy.safetensors"
    policy.save(file, half=True)
    with safe_open(file, framework="pt") as content:
        kinds = {name: content.get_tensor(name).dtype for name in content.keys()}  # noqa: SIM118
    assert kinds["/w/body.0.weight"] == kinds["/theta/output.bias"] == torch.float16
    assert kinds["/p"] == torch.float64
    loaded = LearnedPolicy.load(file)
    assert torch.equal(loaded.probabilities, policy.probabilities)
    assert {value.dtype for value in w(loaded).parameters()} == {torch.float32}
    t = policy.sample(64, seeded())
    exact, rounded = policy.outputs(photos(64), t), loaded.outputs(photos(64), t)
    assert exact.std() > 0.05
    torch.testing.assert_close(rounded, exact, atol=2e-3, rtol=0)
    loaded.save(file, half=True)
    assert same(LearnedPolicy.load(file), loaded)


def test_what_is_too_large_for_half_precision_is_named(tmp_path: Path) -> None:
    learner = trained()
    learner.network.body[1].running_var[0] = 1e5
    with pytest.raises(ValueError, match=r"w/body\.1\.running_var holds 100000, too large for half precision"):
        export(learner).save(tmp_path / "policy.safetensors", half=True)
    assert not list(tmp_path.iterdir())


def test_p_alone(tmp_path: Path) -> None:
    policy, file = learned(), tmp_path / "policy.safetensors"
    policy.sampler_only().save(file)
    assert file.stat().st_size < 10_000
    small = LearnedPolicy.load(file)
    assert torch.equal(small.probabilities, policy.probabilities)
    images, weights = small.augment(photos(), generator=seeded())
    assert torch.equal(images, policy.augment(photos(), generator=seeded())[0])
    torch.testing.assert_close(weights, torch.full((N,), 1 / N))
    sampler, frozen, extractor = small.parts()
    assert torch.equal(sampler.probabilities, policy.probabilities)
    assert isinstance(frozen, ma.UniformPolicy)
    assert extractor is None
    with pytest.raises(ValueError, match="holds p alone and needs no network; leave out extractor="):
        LearnedPolicy.load(file, extractor=ma.network("small-cnn", CLASSES))


class Own(nn.Module):
    """A network that is none of ours, whose features are not what enters its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.neck = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.neck(self.body(images)).amax((2, 3)))


def test_a_network_of_the_users_own_is_handed_in(tmp_path: Path) -> None:
    network, file = Own(), tmp_path / "policy.safetensors"
    policy = export(trained(network, ma.PolicyNetwork(8), features="neck"), network=None)
    policy.save(file)
    fresh = Own()
    before = copy.deepcopy(fresh.state_dict())
    loaded = LearnedPolicy.load(file, extractor=fresh)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
    assert same(loaded, policy)
    t = policy.sample(N, seeded())
    features = network.body(prepare()(photos())).mean((2, 3))
    torch.testing.assert_close(loaded.outputs(photos(), t), theta(policy)(features, ma.embed(t)))
    sampler, frozen, extractor = loaded.parts()
    learner = ma.Learner(Own(), sampler, frozen, extractor=extractor, prepare=prepare())
    seen = learner.observe(photos(), torch.zeros(N).long())
    assert torch.equal(seen.weights, loaded.weights(seen.images, seen.transformation))
    pruned = Own()  # which leaves a tensor that deepcopy refuses: the file was called damaged
    prune.l1_unstructured(pruned.head, "weight", 0.5)
    pruned(torch.rand(2, 3, 4, 4))
    for wrong, sentence in (
        (None, r"is the user's own network; load it in Python with extractor=network"),
        (ma.network("small-cnn", CLASSES), r"cannot be used here: .* pass the extractor that it was learned with"),
        (Own, r"extractor is <class .*Own'>; give the network itself"),
        (pruned, r"cannot be used here: extractor cannot be copied .*; make what computes"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LearnedPolicy.load(file, extractor=wrong)  # type: ignore[arg-type]


def test_a_space_of_the_users_own_is_handed_in(tmp_path: Path) -> None:
    space = Space("mild", {**SPACES["metaaugment"].levels, "Rotate": Level(1.0, signed=True)})
    learner, file = trained(space=space), tmp_path / "policy.safetensors"
    policy = export(learner)
    policy.save(file)
    with pytest.raises(ValueError, match="unknown space 'mild'; pass it with space="):
        LearnedPolicy.load(file)
    with pytest.raises(ValueError, match="magnitudes meant something else"):
        LearnedPolicy.load(file, space=SPACES["metaaugment"])
    assert same(LearnedPolicy.load(file, space=space), policy)


def test_the_hash_is_that_of_the_levels_of_the_papers_functions() -> None:
    space = SPACES["metaaugment"]
    assert len({space_hash(other) for other in SPACES.values()}) == len(SPACES)
    rotate = replace(space.levels["Rotate"], slope=3.0001)
    assert space_hash(replace(space, levels={**space.levels, "Rotate": rotate})) != space_hash(space)
    cutout = replace(space.levels["Cutout"], slope=3.0)
    assert space_hash(replace(space, name="x", levels={**space.levels, "Cutout": cutout})) == space_hash(space)
    # Written down: files that exist already depend on it.
    assert space_hash(space) == HASH


HASH = "b3b1d4ea658a5c9c3b7868b4b83aa9da3cb41e5a3069cf1dfa28ab2f014b8e94"


@pytest.mark.parametrize("name", NETWORKS)
def test_all_of_a_network_of_ours_is_in_its_tensors(name: str) -> None:
    with torch.device("meta"):
        network = ma.network(name, CLASSES)
    state = network.state_dict()
    assert all(tensor in state for tensor, _ in (*network.named_parameters(), *network.named_buffers()))


# -- use --------------------------------------------------------------------------------------------------------------


def by_hand(policy: LearnedPolicy, images: Tensor, t: ma.Transformation) -> Tensor:
    """P from the formulas, the features by a hook."""
    network, head = w(policy), theta(policy)
    kept = []
    hook = network.output.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    mean, std = torch.tensor(policy.source.mean), torch.tensor(policy.source.std)
    network((images / 255 - mean[:, None, None]) / std[:, None, None])
    hook.remove()
    left = torch.relu(ma.embed(t) @ head.embedding.weight.T + head.embedding.bias)
    right = torch.relu(kept[0] @ head.feature.weight.T + head.feature.bias)
    return torch.sigmoid(torch.cat([left, right], 1) @ head.output.weight[0] + head.output.bias)


@pytest.mark.parametrize(("channels", "side"), [(1, SIDE), (3, SIDE), (3, 8), (3, 31)])
def test_weights_by_hand(channels: int, side: int) -> None:
    """Of images of the size that it was learned with, and of others."""
    policy, given = learned(channels), photos(channels=channels, side=side)
    images, weights = policy.augment(given, generator=seeded())
    t = policy.sample(N, seeded())
    assert torch.equal(images, ma.apply(given, t, "metaaugment", FILL[:channels]))
    outputs = by_hand(policy, images, t)
    assert outputs.std() > 0.05
    torch.testing.assert_close(policy.outputs(images, t), outputs)
    torch.testing.assert_close(weights, outputs / outputs.sum())
    assert torch.equal(weights, policy.weights(images, t))
    assert weights.sum().item() == pytest.approx(1)
    assert not weights.requires_grad


def test_an_output_does_not_depend_on_the_batch() -> None:
    policy = learned()
    t = policy.sample(N, seeded())
    outputs = policy.outputs(photos(), t)
    others = photos(seed=1)
    others[3] = photos()[3]
    assert policy.outputs(others, t)[3] == outputs[3]
    for i in range(N):
        torch.testing.assert_close(policy.outputs(photos()[i : i + 1], t[i])[0], outputs[i], atol=1e-6, rtol=0)


def weights_of_a_share(rank: int, world: int, file: Path) -> Tensor:
    return LearnedPolicy.load(file).augment(photos().chunk(world)[rank], generator=seeded())[1]


def test_weights_are_normalised_over_all_processes(tmp_path: Path) -> None:
    """Two with half of the images each give them the weights that one with all of them gives."""
    learned().save(file := tmp_path / "policy.safetensors")
    halves = together(2, weights_of_a_share, tmp_path / "together", file)
    torch.testing.assert_close(torch.cat(halves), weights_of_a_share(0, 1, file))


def test_rejected_samples_have_no_weight() -> None:
    policy = learned(policy=ma.RejectingPolicy(sharp(ma.PolicyNetwork(128))))
    images, weights = policy.augment(photos(), generator=seeded())
    outputs = policy.outputs(images, policy.sample(N, seeded()))
    kept = outputs * (outputs >= outputs.mean())
    assert 0 < (kept == 0).sum() < N
    torch.testing.assert_close(weights, kept / kept.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_images_in_the_unit_range_are_the_same_images(dtype: torch.dtype) -> None:
    policy = learned()
    expected, weights = policy.augment(photos(), generator=seeded())
    images, same_weights = policy.augment(photos().to(dtype) / 255, generator=seeded())
    assert images.dtype == dtype
    assert torch.equal((images.double() * 255).round().to(torch.uint8), expected)
    assert torch.equal(same_weights, weights)


def test_autocast_reaches_the_extractor_and_not_the_policy() -> None:
    policy = learned()
    with torch.autocast("cpu", torch.bfloat16):
        weights = policy.augment(photos(), generator=seeded())[1]
    exact = policy.augment(photos(), generator=seeded())[1]
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, exact)
    torch.testing.assert_close(weights, exact, atol=0.01, rtol=0)


BAD_IMAGES = {
    "grey": (photos(channels=1), r"have 1 channels, but the policy was learned on images with 3"),
    "an array": (photos().numpy(), r"images is a ndarray; give a torch tensor"),
    "whole numbers": (
        photos().long(),
        r"images has dtype torch\.int64; use torch\.uint8, or floating point in \[0, 1\]",
    ),
    "one image": (photos()[0], r"images has shape \(3, 16, 16\); a batch is \[n, channels, height, width\]"),
    "no image": (photos()[:0], r"n > 0"),
    "no pixel": (photos()[..., :0], r"images are 16 by 0 pixels; sides of 1 to 16383 are allowed"),
    "normalised": (prepare()(photos()), r"images holds .*; floating-point images lie in \[0, 1\]"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_images_that_do_not_fit_are_refused(kind: str) -> None:
    images, sentence = BAD_IMAGES[kind]
    policy = learned()
    for used in (policy, policy.sampler_only()):
        for use in (used.augment, used.transform):
            drawn_from = seeded()
            before = torch.get_rng_state(), drawn_from.get_state()
            for generator in (None, drawn_from):
                with pytest.raises(ValueError, match=sentence):
                    use(images, generator=generator)
            assert torch.equal(torch.get_rng_state(), before[0])
            assert torch.equal(drawn_from.get_state(), before[1])


def test_it_goes_to_the_workers_of_a_loader() -> None:
    policy = learned()
    assert same(pickle.loads(pickle.dumps(policy)), policy)
    assert same(copy.deepcopy(policy), policy)


def test_a_digest_is_of_what_it_does(tmp_path: Path) -> None:
    """The same after a round trip; another for all else that makes other images or weights; provenance does not."""
    policy = learned()
    policy.save(tmp_path / "a.safetensors")
    again = LearnedPolicy.load(tmp_path / "a.safetensors")
    assert again.digest() == policy.digest()
    digests = {policy.digest()}
    for change in (theta(again).output.bias, next(w(again).parameters())):
        with torch.no_grad():
            change.view(-1)[0].add_(1)
        digests.add(again.digest())
    digests.add(policy.sampler_only().digest())
    assert len(digests) == 4
    for changes in ({"fill": (200, 0, 0)}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}):
        source = replace(policy.source, **changes)
        digests.add(LearnedPolicy(policy.probabilities, source, *policy.modules).digest())
    head = build("exponential-policy-network", 128)
    head.load_state_dict(theta(policy).state_dict())
    digests.add(LearnedPolicy(policy.probabilities, policy.source, head, w(policy)).digest())
    assert len(digests) == 7


@pytest.mark.gpu
def test_on_a_gpu_and_back(tmp_path: Path) -> None:
    policy = learned()
    policy.save(tmp_path / "policy")
    moved = LearnedPolicy.load(tmp_path / "policy").to("cuda")
    t = policy.sample(N, seeded())
    torch.testing.assert_close(moved.outputs(photos().cuda(), t).cpu(), policy.outputs(photos(), t), atol=1e-3, rtol=0)
    with pytest.raises(
        ValueError, match=r"the images are on cpu, but the policy is on cuda:0; move it with policy\.to"
    ):
        moved.outputs(photos(), t)
    images, weights = moved.augment(photos().cuda())
    assert images.is_cuda
    assert weights.is_cuda
    moved.save(tmp_path / "again")
    assert same(LearnedPolicy.load(tmp_path / "again"), policy)


# -- a learner under it -----------------------------------------------------------------------------------------------


def under(policy: LearnedPolicy, network: nn.Module, **options: Any) -> ma.Learner:
    sampler, frozen, extractor = policy.parts()
    options = {"prepare": prepare(), "fill": FILL, "generator": seeded(), **options}
    return ma.Learner(network, sampler, frozen, extractor=extractor, space=policy.space, **options)


def test_a_step_under_it_is_the_appendix_equation() -> None:
    """v − γ Σ V_i ∇L_i(v), with the weights of the frozen policy; no validation batch, nothing of the policy moves."""
    policy = learned()
    before = {name: value.clone() for name, value in tensors(policy).items()}
    network = ma.network("small-cnn", CLASSES)
    other, labels = copy.deepcopy(network), LABELS
    learner = under(policy, network)
    seen = learner.step(photos(), labels, torch.optim.SGD(network.parameters(), 0.1))
    learner.sampler.update()
    assert not learner.due

    t = policy.sample(N, seeded())
    images = ma.apply(photos(), t, "metaaugment", FILL)
    assert torch.equal(seen.images, images)
    assert torch.equal(seen.weights, policy.weights(images, t))
    outputs = by_hand(policy, images, t)
    losses = F.cross_entropy(other(prepare()(images)), labels, reduction="none")
    gradients = torch.autograd.grad((outputs / outputs.sum()).detach() @ losses, list(other.parameters()))
    for v, w, g in zip(network.parameters(), other.parameters(), gradients, strict=True):
        torch.testing.assert_close(v, w - 0.1 * g)

    frozen, extractor = learner.policy, learner.extractor
    assert extractor is not None
    assert all(p.grad is None and not p.requires_grad for part in (frozen, extractor) for p in part.parameters())
    assert learner.policy_parameters() == [learner.alpha]
    assert all(torch.equal(value, before[name]) for name, value in tensors(policy).items())
    after = {f"theta/{name}": value for name, value in frozen.policy.state_dict().items()}
    after |= {f"w/{name}": value for name, value in extractor.network.state_dict().items()}
    after["p"] = learner.sampler.probabilities
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_parts_are_copies_and_stay_in_evaluation_mode() -> None:
    policy = learned()
    sampler, frozen, extractor = policy.parts()
    assert extractor is not None
    before = {name: value.clone() for name, value in tensors(policy).items()}
    with torch.no_grad():
        for value in (sampler.probabilities, *frozen.parameters(), *extractor.parameters(), *extractor.buffers()):
            value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in tensors(policy).items())
    holder = nn.ModuleList([frozen, extractor]).train()
    assert holder.training
    assert not any(module.training for part in (frozen, extractor) for module in part.modules())


@pytest.mark.parametrize(("mean", "std"), [((0.1, 0.2, 0.3), (0.5, 0.4, 0.3)), ((0, 0, 0), (1, 1, 1))])
def test_the_extractor_sees_its_own_normalisation(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Whatever the learner's is; the second is that of a learner without `prepare`, which divides by 255."""
    policy = learned()
    sampler, frozen, extractor = policy.parts(mean, std)
    given = None if std == (1, 1, 1) else prepare(mean, std)
    learner = ma.Learner(ma.network("small-cnn", CLASSES), sampler, frozen, extractor=extractor, prepare=given)
    seen = learner.observe(photos(), torch.zeros(N).long())
    torch.testing.assert_close(seen.outputs, policy.outputs(seen.images, seen.transformation), atol=1e-5, rtol=0)
    wrong = ma.Learner(learner.network, sampler, policy.parts()[1], extractor=policy.parts()[2], prepare=given)
    seen = wrong.observe(photos(), torch.zeros(N).long())
    assert (seen.outputs - policy.outputs(seen.images, seen.transformation)).abs().max() > 1e-3


def test_a_normalisation_that_does_not_fit_is_refused() -> None:
    policy = learned()
    with pytest.raises(ValueError, match=r"one of mean and std; give both, or neither"):
        policy.parts(mean=MEAN)
    for mean, std, sentence in (
        (MEAN[:1], STD[:1], "for 3 channels it needs 3 numbers"), (MEAN, (0.1, 0.0, 0.1), "number must be above 0"),
        ((), (), "for 3 channels it needs 3 numbers"), ((0.1, 0.1, float("nan")), STD, "both must be finite numbers"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            policy.parts(mean, std)


def test_networks_of_other_precision_train_under_it() -> None:
    policy = learned()
    for dtype in (torch.float64, torch.bfloat16):
        network = ma.network("small-cnn", CLASSES).to(dtype)
        learner = under(policy, network, prepare=lambda images, dtype=dtype: prepare()(images).to(dtype))
        seen = learner.step(photos(), torch.zeros(N).long(), torch.optim.SGD(network.parameters(), 0.1))
        expected = policy.weights(seen.images, seen.transformation)
        torch.testing.assert_close(seen.weights.float(), expected, atol=5e-3, rtol=0)


# -- from a learner ---------------------------------------------------------------------------------------------------


def test_an_extractor_of_the_policys_own_is_kept() -> None:
    own = ma.network("small-cnn", CLASSES)
    learner = trained(Own(), extractor=own)
    policy = export(learner)
    found = w(policy).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in own.state_dict().items())
    assert policy.source.layer == "output"


def test_num_classes_are_those_of_the_network() -> None:
    """A policy that looks at labels would refuse classes that it has learned on."""
    for policy in (ma.CluePolicy(8), ma.PolicyNetwork(8)):
        learner = trained(Own(), policy)
        for wrong in (CLASSES - 2, CLASSES + 1):
            said = rf"num_classes is {wrong}, but the network .* has {CLASSES} outputs; give num_classes={CLASSES}$"
            with pytest.raises(ValueError, match=said):
                LearnedPolicy.from_learner(learner, None, wrong, MEAN, STD, SIDE)
        assert LearnedPolicy.from_learner(learner, None, CLASSES, MEAN, STD, SIDE).source.num_classes == CLASSES


def test_a_network_without_scores_of_classes_is_kept() -> None:
    """As a policy that looks at no labels may see through: one number for each sample, a map, or several outputs."""
    for change in (lambda x: x[:, :1], lambda x: x[:, :, None, None], lambda x: {"logits": x}):
        extractor = Own()
        extractor.register_forward_hook(lambda module, inputs, output, change=change: change(output))
        learner = trained(None, ma.PolicyNetwork(8), extractor=extractor)
        assert export(learner, None).source.num_classes == CLASSES


def test_mean_and_deviation_are_those_of_prepare() -> None:
    """Weights through others have nothing to do with those that were learned."""
    learner = trained(prepare=None)
    made = r"but the learner's prepare turns them into \[\[0\.0, 0\.0, 0\.0\], \[1\.0, 1\.0, 1\.0\]\]"
    for mean, std in ((MEAN, STD), ((125,) * 3, (60,) * 3)):
        with pytest.raises(ValueError, match=made):
            LearnedPolicy.from_learner(learner, "small-cnn", CLASSES, mean, std, SIDE)
    policy = LearnedPolicy.from_learner(learner, "small-cnn", CLASSES, (0,) * 3, (1,) * 3, SIDE)
    assert policy.source.std == (1, 1, 1)


def test_a_prepare_of_floats_or_with_noise_is_as_good() -> None:
    """Of images in [0, 1]; and of what it draws nothing is missing afterwards."""
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    learner = ma.Learner(
        ma.network("small-cnn", CLASSES), ma.TransformationSampler(), ma.PolicyNetwork(128),
        prepare=lambda images: (images - mean) / std + 0.01 * torch.rand(images.shape),
    )  # fmt: skip
    learner.observe(photos() / 255, LABELS)
    before = torch.get_rng_state()
    assert export(learner).source.mean == MEAN
    assert torch.equal(torch.get_rng_state(), before)


def test_a_prepare_may_pad_and_take_other_images() -> None:
    """Most pixels say what it does; and of one that takes no bytes nothing is known."""
    for change in (nn.ZeroPad2d(3), lambda images: images):
        own = Own()
        learner = trained(own, ma.PolicyNetwork(8), prepare=lambda images, change=change: change(prepare()(images)))
        assert export(learner, None).source.mean == MEAN

    def floats_only(images: Tensor) -> Tensor:
        if images.dtype == torch.uint8:
            raise TypeError("float images, please")
        return images

    learner = trained()
    learner.prepare = floats_only
    assert export(learner).source.mean == MEAN


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_policy_is_kept() -> None:
    learner = trained()
    expected = export(learner).digest()
    learner.policy = torch.compile(learner.policy)  # type: ignore[assignment]
    assert export(learner).digest() == expected


def test_fill_is_the_learners() -> None:
    assert export(trained(fill=7)).source.fill == (7, 7, 7)


class Mine(ma.PolicyNetwork):
    """A class that is not ours."""


def without_p() -> ma.Learner:
    learner = trained()
    learner.sampler = ma.IdentitySampler()
    return learner


def from_own(mean: Any, std: Any) -> LearnedPolicy:
    learner = trained(Own(), ma.PolicyNetwork(8), prepare=None, fill=0)
    return LearnedPolicy.from_learner(learner, None, CLASSES, mean, std, SIDE)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "another network": (lambda: export(trained(), "wrn-40-2"), r"the tensor w/stem\.weight is missing"),
    "an unknown network": (lambda: export(trained(), "large-cnn"), r"unknown network 'large-cnn'; pass it"),
    "a network of one's own": (
        lambda: export(trained(Own(), ma.PolicyNetwork(8))),
        r"network is not small-cnn: the tensor .*; .* give network_name=None",
    ),
    "a class of one's own": (
        lambda: export(trained(None, Mine(128))),
        "a policy of class Mine cannot be saved; use one of policy-network",
    ),
    "a head of one's own": (
        lambda: export(trained(None, ma.PolicyNetwork(128, head=F.softplus))),
        r"a policy with the head .*softplus.* cannot be saved; use torch\.sigmoid",
    ),
    "a policy from a file": (
        lambda: export(under(learned(), ma.network("small-cnn", CLASSES))),
        "under a policy from a file and does not learn one; copy that file",
    ),
    "no p": (lambda: export(without_p()), "a IdentitySampler, has no p of pairs to keep; use one that has"),
    "too few means": (lambda: from_own([0], [1]), r"expected input.* to have 3 channels, but got 1 channels"),
    "a number for means": (lambda: from_own(0.5, 1), r"mean is 0\.5 and std 1; both need one number per channel"),
    "no extractor": (
        lambda: LearnedPolicy(learned().probabilities, learned().source, policy=ma.PolicyNetwork(128)),
        "give both, or neither for p alone",
    ),
    "images too small for the extractor": (
        lambda: learned().augment(photos(side=4)),
        r"fails on images of 4 by 4 pixels \(.*learned on 16 by 16: .*sampler_only\(\)",
    ),
    "a learner on images of other channels": (
        lambda: under(learned(), ma.network("small-cnn", CLASSES, 1), prepare=None, fill=0).observe(
            photos(channels=1), LABELS
        ),
        "have 1 channels, but the policy was learned on images with 3",
    ),
    "too few transformations": (
        lambda: learned().weights(photos(), learned().sample(3)),
        "12 images but 3 transformations",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_policy_can_be_made_of_or_take_is_refused(kind: str) -> None:
    make, sentence = REFUSED[kind]
    with pytest.raises(ValueError, match=sentence):
        make()


def test_samplers_with_a_p_are_kept() -> None:
    learner = trained()
    p = torch.rand(14, 14, dtype=torch.float64)
    learner.sampler = FixedSampler(p / p.sum())
    assert torch.equal(export(learner).probabilities, p / p.sum())
    learner.sampler = ma.UniformSampler()
    torch.testing.assert_close(export(learner).probabilities, torch.full((14, 14), 1 / 196).double())
    still = export(trained(None, ma.UniformPolicy()))  # which learns nothing
    assert isinstance(still.policy, ma.UniformPolicy)
    assert (still.extractor, still.modules) == (None, ())


def test_provenance_is_json() -> None:
    p, source = learned().probabilities, learned().source
    for provenance in ({"accuracy": torch.ones(1)}, {"loss": float("nan")}):
        with pytest.raises(ValueError, match="the provenance is not valid JSON"):
            LearnedPolicy(p, source, provenance=provenance)
    assert LearnedPolicy(p, source, provenance={"seeds": (1, 2)}).provenance == {"seeds": [1, 2]}


# -- in words ---------------------------------------------------------------------------------------------------------


def test_the_words_say_what_is_in_it() -> None:
    policy = learned()
    p = torch.full((14, 14), 0.5 / 195, dtype=torch.float64)
    p[2, 4] = 0.5  # Rotate, Solarize
    policy = LearnedPolicy(p, policy.source, theta(policy), w(policy), policy.provenance)
    text = "\n".join(learned_in_words(policy))
    assert re.search(r"^likeliest +Rotate \+ Solarize 50\.000%, ", text, re.MULTILINE)
    assert re.search(r"^Rotate +53\.33%, 3\.59%$", text, re.MULTILINE)  # 0.5 + 13 · 0.5 / 195, and 14 · 0.5 / 195
    found = (
        "policy-network, 16,001 parameters",
        "128 features",
        "small-cnn",
        "5 classes",
        "16 × 16",
        HASH,
        "metaaugment",
    )
    assert all(words in text for words in found)
    assert "  recipe: digits\n  test_accuracy: 0.97\n" in text
    assert "none: p alone" in "\n".join(learned_in_words(policy.sampler_only()))
