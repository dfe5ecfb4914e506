"""Whether a policy learns anything: on data whose answer is known, by hand, and in plain words."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import metaaugment as ma
from metaaugment.lab import cli
from metaaugment.lab.data.batches import Batches
from metaaugment.lab.data.images import Images
from metaaugment.lab.experiments import alignment, diagnosis, prediction
from metaaugment.lab.experiments.alignment import Samples
from metaaugment.lab.experiments.diagnosis import CLUES, INPUTS, LABEL, PAPER, Correlation, Diagnosis, diagnose
from metaaugment.lab.report import diagnosis as report
from metaaugment.lab.seeds import HALVES, derived_seed
from metaaugment.lab.training import json_file
from metaaugment.lab.training.trainer import cosine
from metaaugment.ops import INDEX
from metaaugment.policy import build

from commands import Captured, program, refused
from trees import write_folder

CPU = torch.device("cpu")


# -- data whose answer is known ----------------------------------------------------------------------------------------


class Harmless(ma.UniformSampler):
    """Functions that hardly change a digit."""

    def sample(self, n: int, generator: torch.Generator | None = None) -> ma.Transformation:
        t = super().sample(n, generator)
        names = torch.tensor([INDEX[name] for name in ("Identity", "Color", "Posterize")])
        return ma.Transformation(names[t.first % 3], names[t.second % 3], 0.3 * t.magnitudes, t.signs)


def marked() -> tuple[Images, Images]:
    """Digits, half of which have a white corner and any label; and clean ones to validate on.

    Which samples help shows in the image, and not in its transformation.
    """
    data, generator = ma.dataset("digits", size=16), torch.Generator().manual_seed(0)
    assert isinstance(data.train, Images)
    assert isinstance(data.test, Images)
    images, labels = data.train.images.clone(), data.train.labels.clone()
    mark = torch.rand(len(labels), generator=generator) < 0.5
    images[mark, :, :4, :4] = 255
    labels[mark] = torch.randint(0, 10, (int(mark.sum()),), generator=generator)
    return Images(images, labels), Images(data.test.images[:600], data.test.labels[:600])


def found(rate: float, shuffled: bool = False, steps: int = 100) -> Diagnosis:
    """Of a network trained with a policy that learns by regression at this rate."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    train, val = marked()
    if shuffled:
        val = Images(val.images, val.labels[torch.randperm(len(val), generator=generator)])
    policy = build("regressing-exponential-policy-network", 128)
    learner = ma.Learner(ma.network("small-cnn", 10), Harmless(), policy, lagged=True, generator=generator)
    task = torch.optim.SGD(learner.network.parameters(), 0.03, momentum=0.9, weight_decay=5e-4)
    outer = torch.optim.Adam(learner.policy_parameters(), rate)
    batches, validation = Batches(train, 64, 0, CPU).since(0), Batches(val, 128, 1, CPU).since(0)
    for step in range(steps):
        task.param_groups[0]["lr"] = cosine(0.03, steps)(step)
        learner.step(*next(batches), task, outer, validation)
    return diagnose(learner, Batches(train, 64, 0, CPU), val, samples=1024, update=128)


@pytest.mark.slow
def test_what_a_frozen_policy_could_learn_a_trained_one_has_learned() -> None:
    frozen, learned = found(0.0), found(3e-3)
    for one in (frozen, learned):
        assert one.predicted["pair"].mean < 0.12
        assert one.predicted["feature"].mean > 0.18
        sizes = sorted(one.noise)
        assert one.noise[sizes[0]].mean < one.noise[sizes[-1]].mean  # the more validation images, the less noise
    assert frozen.captured is not None
    assert learned.captured is not None
    assert abs(frozen.captured.mean) < 0.1
    assert frozen.verdict().startswith("It could learn more: ")
    assert learned.captured.mean > 0.15
    assert learned.verdict().startswith("It learned: ")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_nothing_can_be_learned_from_shuffled_labels() -> None:
    assert found(3e-3, shuffled=True).verdict().startswith("Nothing can be learned: the network is right on ")


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_gradient_of_many_validation_images_is_that_of_their_mean_loss() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    learner = ma.Learner(network, ma.IdentitySampler(), ma.PolicyNetwork(8).double())
    _, val = marked()
    places = torch.arange(50) * 7
    v = alignment.validation_gradient(learner, val, places, Batches(val, 16, 0, CPU))
    loss = nn.functional.cross_entropy(network(val.images[places].double() / 255), val.labels[places])
    for ours, whole in zip(v, torch.autograd.grad(loss, list(network.parameters())), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-14)


def test_the_alignment_is_the_fall_of_each_loss_along_the_gradient() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    learner = ma.Learner(network, ma.IdentitySampler(), ma.PolicyNetwork(8).double(), route="forward")
    train, val = marked()
    samples = alignment.collect(learner, Batches(train, 16, 0, CPU), val, 32, 0, lambda loop, what: loop)
    both = alignment.halves(val.labels, derived_seed(0, HALVES, 0))
    v = alignment.validation_gradient(learner, val, both[1], Batches(train, 16, 0, CPU))
    images, labels = next(Batches(train, 16, 0, CPU).since(0))
    for i in range(16):
        loss = nn.functional.cross_entropy(network(images[i : i + 1].double() / 255), labels[i : i + 1])
        g = torch.autograd.grad(loss, list(network.parameters()))
        by_hand = sum(float((a * b).sum()) for a, b in zip(g, v, strict=True))
        assert float(samples.halves[0][1][i]) == pytest.approx(by_hand, rel=1e-9)


def test_small_draws_are_compared_by_the_first_samples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, 10)).double()
    learner = ma.Learner(network, ma.IdentitySampler(), ma.PolicyNetwork(8).double(), route="forward")
    train, val = marked()
    by_all = alignment.collect(learner, Batches(train, 16, 0, CPU), val, 64, 0, lambda loop, what: loop)
    monkeypatch.setattr(alignment, "ENOUGH", 32)
    fewer = alignment.collect(learner, Batches(train, 16, 0, CPU), val, 64, 0, lambda loop, what: loop)
    *small, half = by_all.alignment
    assert small
    for size, number in (*((size, 32) for size in small), (half, 64)):
        for ours, all_of_them in zip(fewer.alignment[size], by_all.alignment[size], strict=True):
            for one, other in zip(ours, all_of_them, strict=True):
                assert torch.equal(one, other[:number])


def test_halves_have_nothing_in_common_and_all_classes_alike() -> None:
    labels = torch.tensor([0] * 21 + [1] * 40 + [2] * 20)[torch.randperm(81)]
    left, right = alignment.halves(labels, 3)
    assert len(left) == len(right) == 40
    assert not set(left.tolist()) & set(right.tolist())
    for side in (left, right):
        assert torch.bincount(labels[side]).tolist() == [10, 20, 10]
    assert not torch.equal(left, alignment.halves(labels, 4)[0])
    assert torch.equal(left, alignment.halves(labels, 3)[0])


def test_small_draws_are_random_and_the_largest_are_halves() -> None:
    labels = torch.arange(500).repeat(2)
    drawn = alignment.draws(labels, 0)
    assert list(drawn) == [32, 64, 128, 256, 500]
    for size, (left, right) in drawn.items():
        assert len(set(left.tolist())) == len(set(right.tolist())) == size
        assert not set(left.tolist()) & set(right.tolist())
    assert labels[drawn[500][0]].sort()[0].tolist() == labels[drawn[500][1]].sort()[0].tolist() == list(range(500))
    # Of 32 random images 16 have their class in the first half; of those of 32 equal classes all would be common.
    common = set(labels[drawn[32][0]].tolist()) & set(labels[drawn[32][1]].tolist())
    assert len(common) < 8
    assert not torch.equal(drawn[32][0], alignment.draws(labels, 1)[32][0])


def test_pairs_that_were_not_fitted_have_the_mean_of_all() -> None:
    pair, s = torch.tensor([3, 3, 7, 7, 9]), torch.tensor([1.0, 2.0, 6.0, 50.0, 90.0])
    means = prediction.pair_means(pair, s, torch.tensor([0, 1, 2]))
    assert means.tolist() == [1.5, 1.5, 6.0, 6.0, 3.0]


def planted(n: int = 1200) -> Samples:
    """s is a function of the feature and noise, which differs from half to half."""
    torch.manual_seed(0)
    known = {"pair": torch.randint(0, 100, (n,)), "embedding": torch.randn(n, 28), "feature": torch.randn(n, 5),
             "clues": torch.rand(n, 3), "label": torch.randint(0, 10, (n,))}  # fmt: skip
    signal = known["feature"][:, 0].abs()
    signal = (signal - signal.mean()) / signal.std()
    pairs = [(signal.double() + torch.randn(n), signal.double() + torch.randn(n)) for _ in range(4)]
    return Samples(known, torch.arange(n), signal.double(), {500: pairs})


def test_a_planted_signal_is_found_where_it_is_and_nowhere_else() -> None:
    samples = planted()
    of = {name: prediction.predictability(samples, INPUTS[name], *samples.halves[0], 0) for name in INPUTS}
    best = math.sqrt(0.5)  # of half signal, half noise
    assert best - 0.12 < of["feature"] < best + 0.08
    assert of[LABEL] > 0.4
    assert all(abs(of[name]) < 0.2 for name in ("pair", "embedding", "clues"))
    captured = diagnosis.captured(samples, 0)
    assert captured is not None
    assert captured.mean == pytest.approx(best, abs=0.05)


def test_a_prediction_gains_nothing_from_other_samples_of_the_same_image() -> None:
    """Whose feature, all noise, would name the image."""
    torch.manual_seed(0)
    images, copies = 200, 6
    feature = torch.randn(images, 30).repeat_interleave(copies, 0)
    s = torch.randn(images).repeat_interleave(copies, 0).double()
    samples = replace(planted(images * copies), place=torch.arange(images).repeat_interleave(copies, 0))
    samples.known["feature"] = feature
    assert abs(prediction.predictability(samples, ("feature",), s, s, 0)) < 0.25
    alone = replace(samples, place=torch.arange(images * copies))
    assert prediction.predictability(alone, ("feature",), s, s, 0) > 0.5


@pytest.mark.parametrize("method", ["faa", "trivialaugment", "randaugment"])
@pytest.mark.usefixtures("quick")
def test_without_a_policy_it_says_what_can_still_be_measured(method: str, tmp_path: Path, capsys: Captured) -> None:
    """Also of functions outside the paper's."""
    words = ["--method", method, "--epochs", "1", "--per-class", "20", "--batch", "20"]
    cli.main(["train", "digits", *words, "--out", str(tmp_path / "run")])
    assert program("diagnose", tmp_path / "run", "--samples", 200) == 0
    said = capsys.readouterr().out
    assert "in the outputs of the policy             it has none" in said
    assert "from feature" in said


def test_numbers_that_are_not_finite_are_no_diagnosis() -> None:
    _, val = marked()
    network = ma.network("small-cnn", 10)
    learner = ma.Learner(network, ma.IdentitySampler(), ma.PolicyNetwork(128))
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    with pytest.raises(ValueError, match="gives numbers that are not finite"):
        alignment.collect(learner, Batches(val, 32, 0, CPU), val, 64, 0, lambda loop, what: loop)


def test_a_prediction_gains_nothing_from_the_noise_of_one_half() -> None:
    """Noise of one half that the label says all of is no signal by the other half."""
    samples = planted()
    noise = torch.randn(10).double()[samples.known["label"]]
    one, other = noise, torch.randn(1200).double()
    assert prediction.predictability(samples, INPUTS[LABEL], one, one, 0) > 0.9
    assert abs(prediction.predictability(samples, INPUTS[LABEL], one, other, 0)) < 0.15


def test_a_prediction_leaves_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other devices as well, which a plain seed sets too."""
    elsewhere: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", elsewhere.append)
    samples = planted(200)
    elsewhere.clear()
    state = torch.get_rng_state()
    prediction.predictability(samples, ("feature",), *samples.halves[0], 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert elsewhere == []


# -- the verdict -------------------------------------------------------------------------------------------------------


def number(mean: float, deviation: float = 0.02) -> Correlation:
    return Correlation(mean, deviation)


BASE = Diagnosis(
    samples=2000, validation=1000, update=128, accuracy=0.7, chance=0.1,
    noise={32: number(0.2), 128: number(0.5), 500: number(0.8)},
    predicted={name: number(0.4 if "feature" in name else 0.02) for name in INPUTS}, captured=number(0.35),
)  # fmt: skip


def predicted(**values: float) -> dict[str, Correlation]:
    names = {"paper": PAPER, "clues": CLUES, "label": LABEL}
    return {**dict.fromkeys(INPUTS, number(0.0)), **{names[key]: number(value) for key, value in values.items()}}


NONE = number(0.0)
MORE = r"It could learn more: .*\. Train with a higher --policy-lr"


@pytest.mark.parametrize(("changes", "words"), [
    ({}, r"It learned: its outputs correlate with the alignment at 0.35\. A prediction from feature and transformation "
     r"reaches 0.40 ± 0.02\."),
    ({"captured": number(0.05)}, MORE),
    ({"captured": number(0.05), "noise": {32: number(0.05), 128: number(0.2), 500: number(0.6)}},
     r"An update with 128 validation images is mostly noise: train with a larger --policy-batch, up to all 1000"),
    ({"captured": NONE, "predicted": predicted(paper=0.25, label=0.6)},
     r"; one that also sees the loss and label reaches 0.60\. Train with --policy-network exponential-label-"),
    ({"captured": NONE, "predicted": predicted(paper=0.1, clues=0.3, label=0.6), "sees": CLUES},
     r"from feature, transformation and loss reaches 0.30 ± 0.02; one that also sees the label reaches 0.60\."),
    ({"captured": NONE, "predicted": predicted(paper=0.05, clues=0.5, label=0.4)},
     r"There is nothing to learn at this point from what the policy sees\. .* one that also sees the loss reaches 0.50"
     r"\. This is a lower bound: .* Whether it learned before cannot be told .* exponential-clue-policy"),
    ({"captured": NONE, "learns": False, "predicted": predicted(paper=0.05, clues=0.5)},
     r"The policy was not learned in this run, .* reaches 0.05 ± 0.02; .* sees the loss reaches 0.50\. One that"),
    # A part of what it sees says more than all of it.
    ({"captured": NONE, "predicted": {**predicted(paper=0.05), "feature": number(0.3)}},
     r"It could learn more: .* from feature and transformation reaches 0.30 ± 0.02\. Train with a higher"),
    # For a hundredth more no labels.
    ({"captured": NONE, "predicted": predicted(paper=0.1, clues=0.43, label=0.44)},
     r"one that also sees the loss reaches 0.43\. .* Train with --policy-network exponential-clue-policy"),
    ({"captured": NONE, "predicted": predicted(paper=0.3, clues=0.5, label=0.6), "sees": LABEL},
     r"from feature, transformation, loss and label reaches 0.60 ± 0.02\. Train with a higher --policy-lr"),
    ({"captured": NONE, "learns": False}, "The policy was not learned in this run, .*: its outputs correlate"),
    ({"captured": NONE, "sees": LABEL}, r"--policy-network regressing-exponential-label-policy\.$"),
    ({"captured": NONE, "regresses": True}, r"\. Train with a higher --policy-lr\.$"),
    ({"learns": False}, "It fits: its outputs correlate with the alignment at 0.35"),
    ({"captured": None},
     r"There is something to learn, but this run has no policy to learn it\. .* reaches 0.40 ± 0.02\.$"),
    ({"predicted": predicted(paper=0.05)},
     r"There is nothing to learn at this point: .*at best 0.05 ± 0.02.* Whether it learned before cannot be"),
    ({"predicted": predicted(paper=0.05), "captured": None}, r"may see \(at best .*--samples may find more\.$"),
    ({"noise": {32: NONE, 500: number(0.1, 0.3)}}, "too small to tell: two halves of its 1000 images agree"),
    ({"accuracy": 0.09}, "Nothing can be learned: the network is right on 9.0% .* no more than by chance"),
])  # fmt: skip
def test_verdicts(changes: dict[str, object], words: str) -> None:
    assert re.search(words, replace(BASE, **changes).verdict())


def test_a_diagnosis_as_json_and_in_words() -> None:
    text = json.dumps(BASE.to_json())
    assert Diagnosis.from_json(json.loads(text)) == BASE
    lines = report.in_words(BASE)
    assert any("128 images each" in line and "0.50 ± 0.02" in line for line in lines)
    assert lines[-1] == BASE.verdict()
    picture = report.picture(BASE)
    assert "from pair 0.02 ± 0.02" in picture.words
    left = picture.figure.axes[0]
    assert [round(bar.get_width(), 2) for bar in left.patches][::-1] == [v.mean for v in BASE.predicted.values()]
    for wrong in (
        {}, {**BASE.to_json(), "noise": {}}, {**BASE.to_json(), "predicted": 3}, {**BASE.to_json(), "seed": "0"}
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the diagnosis is damaged"):
            Diagnosis.from_json(wrong)


def test_a_diagnosis_that_is_older_than_the_run_says_so() -> None:
    early = replace(BASE, epoch=2, step=5)
    assert Diagnosis.from_json(json.loads(json.dumps(early.to_json()))) == early
    assert report.picture(early, 3).reading == f"Measured after epoch 2, and the run has 3 by now: {BASE.verdict()}"
    for found, done in ((early, 2), (early, None), (BASE, 3)):
        assert report.picture(found, done).reading == BASE.verdict()
    before = {key: value for key, value in BASE.to_json().items() if key not in ("epoch", "step")}
    assert Diagnosis.from_json(before) == BASE
    for wrong in (-1, 2.5, True, "2", 10**400):
        with pytest.raises(ValueError, match="the diagnosis is damaged"):
            Diagnosis.from_json({**BASE.to_json(), "epoch": wrong})


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the figures do not matter."""
    monkeypatch.setattr(prediction, "LEAST", 2)
    monkeypatch.setattr(prediction, "MOST", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    cli.main(["train", "digits", "--epochs", "2", "--per-class", "20", "--every", "4", "--out", str(folder)])
    return folder


@pytest.mark.usefixtures("quick")
def test_a_run_is_diagnosed_and_the_report_has_it(run: Path, tmp_path: Path, capsys: Captured) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert program("diagnose", run, "--samples", 500, "--picture", tmp_path / "figure.png") == 0
    said = capsys.readouterr().out
    assert "500 training samples, 100 validation images" in said
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    kept = json.loads((run / "diagnosis.json").read_text())
    assert kept["verdict"] in said
    assert (kept["epoch"], kept["step"]) == (2, 0)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert program("diagnose", run, "--samples", 500) == 0
    assert json.loads((run / "diagnosis.json").read_text()) == kept  # the same again
    cli.main(["report", str(run), "--out", str(tmp_path / "report.html")])
    assert "What can be predicted" in (tmp_path / "report.html").read_text()
    assert "Measured after epoch" not in (tmp_path / "report.html").read_text()
    (run / "diagnosis.json").write_text(json.dumps({**kept, "epoch": 1}))
    cli.main(["report", str(run), "--out", str(tmp_path / "older.html")])
    assert "Measured after epoch 1, and the run has 2 by now" in (tmp_path / "older.html").read_text()
    (run / "diagnosis.json").write_text("{}")
    cli.main(["report", str(run), "--out", str(tmp_path / "again.html")])
    assert "the diagnosis is damaged" in (tmp_path / "again.html").read_text()


def test_mistakes_are_one_sentence(run: Path, tmp_path: Path, capsys: Captured) -> None:
    said = partial(refused, capsys, "diagnose")
    assert "is not a run: it has no recipe.json" in said(tmp_path)
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "recipe.json", begun)
    assert "has no checkpoint yet" in said(begun)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    recipe = json.loads((other / "recipe.json").read_text())
    for number in (21, 3):  # also of fewer than a mini-batch: what is wrong is not --batch, which this has not
        (other / "recipe.json").write_text(json.dumps({**recipe, "per_class": number}))
        assert "was trained on other data than digits has now" in said(other)
    (other / "recipe.json").write_text(json.dumps({**recipe, "batch": 5000}))
    assert "--batch is 5000, but there are only 200 training images" in said(other)
    assert "--samples is 10; for mini-batches of" in said(run, "--samples", 10)
    (tmp_path / "there.png").write_text("a picture")
    assert "there.png exists already" in said(run, "--picture", tmp_path / "there.png")
    assert "is not a name for a picture; give it one of the" in said(run, "--picture", tmp_path / "figure.xyz")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_policy_that_is_frozen_at_the_end_was_learned_in_the_run(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was measured is said, also where the folder cannot be written to."""
    folder = tmp_path / "phases"
    phases = ["--random-epochs", "1", "--frozen-epochs", "1", "--epochs", "3", "--per-class", "20"]
    cli.main(["train", "digits", *phases, "--out", str(folder)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "diagnosis.json")

    monkeypatch.setattr(json_file, "write_json", lambda file, value: written.append(value) or full())
    written: list[dict[str, object]] = []
    assert program("diagnose", folder, "--samples", 500) == 2
    assert written[0]["learns"] is True
    assert str(written[0]["verdict"]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([*range(10)] * 4, "has 40 images, too few to compare two halves of them; hold out at least 64"),
        ([*range(69), 99], "has 70 images for 100 classes, so that some have none; hold out at least 100"),
        ([*range(1623)], "the 1623 validation images .* 0 images each, but 32 are needed; hold out at least two"),
    ],
)
def test_a_validation_split_that_is_too_small(labels: list[int], words: str) -> None:
    def split(labels: list[int]) -> Images:
        return Images(torch.zeros(len(labels), 3, 4, 4, dtype=torch.uint8), torch.tensor(labels))

    with pytest.raises(ValueError, match=words):
        diagnosis.check_enough(split(labels), 2048, 128)
    # But it may lack classes: 80 images of two, of which one is the 80th, make two halves of 40.
    diagnosis.check_enough(split([3] * 40 + [79] * 40), 2048, 128)


@pytest.mark.usefixtures("quick")
def test_a_run_is_diagnosed_past_the_files_that_it_went_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """With a training and a validation image that cannot be read, and classes that only the training images have."""
    heads = {f"{part}/{name}": n for part, n in (("train", 40), ("val", 36), ("test", 2)) for name in ("b", "d")}
    data = write_folder(tmp_path / "data", {**heads, "train/a": 1, "train/c": 2, "val/c": 0})
    broken = [data / "train" / "b" / "007.png", data / "val" / "d" / "003.png"]
    for file in broken:
        file.write_bytes(b"no image at all")
    out = tmp_path / "run"
    flags = ("--network", "small-cnn", "--size", 8, "--batch", 20, "--epochs", 2, "--every", 2, "--workers", 0)
    assert program("train", "folder", "--data", data, *flags, "--corrupt", "skip", "--out", out) == 0
    seen = []
    monkeypatch.setattr(diagnosis, "collect", lambda *args: seen.append(alignment.collect(*args)) or seen[-1])
    capsys.readouterr()
    assert program("diagnose", out, "--data", data, "--samples", 160) == 0
    said = capsys.readouterr().out
    assert "skipped 2 image files that could not be read" in said
    assert "160 training samples, 71 validation images" in said
    # Samples of one image have one label: their places are those of the images that were read.
    labels = ma.dataset("folder", data, size=8).train.labels
    assert torch.equal(labels[seen[0].place], seen[0].known["label"])
    assert json.loads((out / "diagnosis.json").read_text())["verdict"] in said
