"""A run is never lost: what is resumed ends bit for bit where an uninterrupted run ends."""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from rich.console import Console

from metaaugment.files import sealed
from metaaugment.files.sealed import Damaged
from metaaugment.lab.baselines import published
from metaaugment.lab.data import DataSet, Images, dataset
from metaaugment.lab.data.batches import Batch, Reader
from metaaugment.lab.experiments import experiment, run, validity
from metaaugment.lab.experiments.export import learned_policy
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training import checkpoint, machine, trainer
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.json_file import Within, read_as, write_json
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.trainer import Trainer, Watcher
from metaaugment.learned.policy import LearnedPolicy

from endings import Stop, assert_same, assert_same_end, final, rows, stopping
from trees import write_folder

QUIET = Console(quiet=True)
# Three epochs of four steps, with a policy update on every second one.
SMALL = {"size": 16, "per_class": 20, "batch": 50, "epochs": 3, "every": 2}


def small(**values: Any) -> Recipe:
    return replace(RECIPES["digits"](), **{**SMALL, **values})


def train(out: Path, resume: bool = False, **values: Any) -> dict[str, Any]:
    place = Place(resume=out) if resume else Place(out=out)
    return run.train(small(**values), place, QUIET)


def told(out: Path, given: Collection[str] = (), **values: Any) -> str:
    """What a run says that is given these flags."""
    said = io.StringIO()
    run.train(small(**values), Place(out=out), Console(file=said, width=500), given)
    return said.getvalue()


def accuracies(out: Path) -> list[float]:
    result = json.loads((out / "result.json").read_text())
    return [result[name] for name in ("test_accuracy", "test_loss", "val_accuracy")]


def read_log(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(out)
    return out


def test_the_folder_of_a_run(uninterrupted: Path) -> None:
    assert Recipe.from_json(json.loads((uninterrupted / "recipe.json").read_text())) == small()
    log = read_log(uninterrupted)
    assert [row["epoch"] for row in log] == [1, 2, 3]
    wanted = {"epoch", "train_loss", "val_loss", "val_accuracy", "alpha", "lr", "seconds", "images_per_second"}
    assert all(wanted <= row.keys() for row in log)
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["val_accuracy"] == log[-1]["val_accuracy"]
    assert 0 <= result["test_accuracy"] <= result["test_top5"] <= 1
    assert result["recipe"] == small().to_json()
    assert json.loads((uninterrupted / "checkpoint.json").read_text())["epoch"] == 3


EPOCH = "an epoch is 4 steps of 50 images and"
NEVER = "the policy will never be updated: --every is"


@pytest.mark.parametrize(
    ("values", "said", "unsaid"),
    [
        # Mini-batches of 50, and 100 validation images: on an H200 an update costs 0.8 + 2 · 0.7 of a plain step.
        ({"every": 2}, f"{EPOCH} 2 policy updates of 100 validation images, about 2.1 ×", NEVER),
        ({"every": 4}, f"{EPOCH} 1 policy update of 100 validation images, about 1.6 ×", NEVER),
        ({"every": 8, "epochs": 2}, f"{EPOCH} 0.5 policy updates of 100 validation images, about 1.3 ×", NEVER),
        ({"copies": 2}, "about 3.5 × plain", NEVER),  # 2 + (2 · 0.8 + 2 · 0.7) / 2
        ({"route": "forward"}, EPOCH, "× plain"),
        ({"every": 5}, f"{NEVER} 5, and it has only 4 steps to learn in;", "1 step"),
        ({"batch": 200}, f"{NEVER} 2, and it has only 1 step to learn in;", "1 steps"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_it_introduces_itself_with_what_an_epoch_has(
    values: dict[str, Any], said: str, unsaid: str, tmp_path: Path
) -> None:
    introduction = told(tmp_path / "run", **{"epochs": 1, **values})
    assert said in introduction
    assert unsaid not in introduction


def test_flags_without_effect_are_said_so_and_have_none(tmp_path: Path) -> None:
    """All fields that only learning has, each at another value: the same run, bit for bit."""
    values: dict[str, Any] = {
        "policy_network": "exponential-clue-policy", "sharpness": 2.0, "extractor": "shared", "learn_alpha": False,
        "real_alpha": True, "policy_batch": 7, "policy_optimizer": "sgd", "policy_lr": 0.5, "policy_schedule": "cosine",
        "policy_momentum": 0.1, "policy_weight_decay": 0.1, "policy_clip": 1.0, "alpha": 3.0, "epsilon": 0.9,
        "window": 3, "route": "unrolled", "lagged": False, "every": 1, "random_epochs": 1, "frozen_epochs": 1,
    }  # fmt: skip
    assert values.keys() == validity.LEARNING
    said = told(tmp_path / "changed", ("epsilon", "every", "epochs"), **{"method": "randaugment", **values})
    assert "--epsilon, --every have no effect: --method randaugment learns no policy" in said
    train(tmp_path / "plain", method="randaugment")
    assert accuracies(tmp_path / "changed") == accuracies(tmp_path / "plain")


@pytest.mark.parametrize(
    ("method", "values", "why"),
    [
        ("baseline", {"space": "autoaugment", "crop": 2, "cutout": 4}, "--crop, --cutout, --space have no effect"),
        ("trivialaugment", {"space": "autoaugment", "baseline_crop": 2}, "--space has no effect: --method trivialaugm"),
        ("faa", {"space": "trivialaugment-wide"}, "--space has no effect: --method faa has a space of its own"),
        ("randaugment", {"baseline_crop": 2}, "--baseline-crop has no effect: only --method baseline uses it"),
        (
            "metaaugment",
            {"sharpness": 2.0},
            "--sharpness has no effect: --policy-network policy-network does not predict",
        ),
        ("metaaugment", {"warmup_lr": 0.5}, "--warmup-lr has no effect: --warmup-epochs is 0"),
        ("advaa", {"copies": 1}, "--copies has no effect: --method advaa uses 8 copies unless --copies is above 1"),
    ],
)
def test_flags_of_other_methods_are_said_to_have_no_effect_and_have_none(
    method: str, values: dict[str, Any], why: str, tmp_path: Path
) -> None:
    assert values.keys() <= validity.idle(small(method=method, **values)).keys()
    assert why in told(tmp_path / "changed", values, epochs=1, method=method, **values)
    train(tmp_path / "plain", epochs=1, method=method)
    assert accuracies(tmp_path / "changed") == accuracies(tmp_path / "plain")


def test_what_decides_nothing_depends_on_the_rest_of_a_recipe() -> None:
    assert validity.idle(small(policy_optimizer="adam"))["policy_momentum"] == "--policy-optimizer is adam"
    assert "policy_momentum" not in validity.idle(small(policy_optimizer="sgd"))
    assert {"alpha", "learn_alpha"} <= validity.idle(small(real_alpha=True)).keys()
    assert not {"alpha", "learn_alpha"} & validity.idle(small()).keys()
    assert "sharpness" not in validity.idle(small(policy_network="regressing-exponential-clue-policy"))
    assert "warmup_lr" not in validity.idle(small(warmup_epochs=1))
    assert "copies" not in validity.idle(small(method="advaa", copies=2))
    assert validity.idle(small(method="faa", policy=Path("faa-cifar10")))["every"] == "--method faa learns no policy"
    assert validity.idle(small(policy=Path("p.safetensors")))["every"] == "--policy names a learned policy"
    assert validity.idle(small(policy=Path("p.safetensors")))["space"] == "--policy has its own"


class Watched(Images):
    """Images that note in `looks`, each time they are read, how many epochs the run in the folder `out` has finished.

    The fingerprint of the data is free: it is made before a run begins, and no choice depends on it."""

    def __init__(self, split: Images, out: Path, looks: list[int]) -> None:
        super().__init__(split.images, split.labels)
        vars(self).update(out=out, looks=looks)

    def __getattribute__(self, name: str) -> Any:
        if name == "images":
            self.looks.append(len(read_log(self.out)) if (self.out / "log.jsonl").exists() else 0)
        return super().__getattribute__(name)

    def digest(self) -> bytes:
        return Images(vars(self)["images"], self.labels).digest()


def watch_the_test_images(given_by: str, out: Path, patch: pytest.MonkeyPatch) -> list[int]:
    """The looks at the test images that a function of `experiment` gives from now on."""
    looks, give = [], getattr(experiment, given_by)

    def watched(*args: Any, **kwargs: Any) -> DataSet:
        data = give(*args, **kwargs)
        return replace(data, test=Watched(data.test, out, looks))

    patch.setattr(experiment, given_by, watched)
    return looks


@pytest.mark.parametrize("held_back", [0.0, 0.25])
def test_what_a_run_is_judged_by_is_looked_at_once_at_the_end(
    held_back: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = watch_the_test_images("data_of", tmp_path / "run", monkeypatch)
    train(tmp_path / "run", epochs=2, held_back=held_back)
    assert looks == [2]


@pytest.mark.parametrize(("of", "size"), [("validation", 100), ("training", 200)])
def test_a_rehearsal_never_looks_at_the_test_set(
    of: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, judged = watch_the_test_images("dataset", tmp_path / "run", monkeypatch), []
    once = run.once
    monkeypatch.setattr(run, "once", lambda split, *more: judged.append(split) or once(split, *more))
    train(tmp_path / "run", epochs=1, held_back=0.25, held_back_from=of, transformations="singles")
    assert looks == []
    whole, (held_back,) = dataset("digits", size=16, per_class=20), judged
    assert len(held_back) == size // 4
    rows = {tuple(row) for row in (whole.val if of == "validation" else whole.train).images.flatten(1).tolist()}
    assert {tuple(row) for row in held_back.images.flatten(1).tolist()} <= rows
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert not any(key.startswith("test") for key in result)
    right = len(held_back) * result["held_back_accuracy"]
    assert right == pytest.approx(round(right))


def test_a_policy_that_has_seen_what_is_held_back_is_refused(uninterrupted: Path, tmp_path: Path) -> None:
    file = tmp_path / "policy.safetensors"
    learned_policy(uninterrupted).save(file)
    with pytest.raises(
        ValueError,
        match=r"--held-back is 0\.5 of the training images, but --policy .* was learned on digits with 0",
    ):
        train(tmp_path / "run", policy=file, held_back=0.5, held_back_from="training")
    fewer = tmp_path / "fewer.safetensors"  # learned from images that are held back of more
    train(tmp_path / "fewer", epochs=1, held_back=0.2, held_back_from="training")
    learned_policy(tmp_path / "fewer").save(fewer)
    with pytest.raises(ValueError, match=r"has seen some that are held back now; .* --split-seed 0 and --per-class 40"):
        train(tmp_path / "run", policy=fewer, held_back=0.2, held_back_from="training", per_class=40)
    with pytest.raises(
        ValueError, match=r"--split-seed is 1, but --policy .* was learned on digits with 0, and .*; use --split-seed 0"
    ):
        train(tmp_path / "run", policy=file, split_seed=1)
    assert not (tmp_path / "run").exists()
    found = tmp_path / "found.json"  # as a search writes it
    values = json.loads((published._FOLDER / "dada-cifar10.json").read_text())
    found.write_text(json.dumps(values | {"search": {"recipe": small().to_json()}}))
    for changes, flag in (
        ({"held_back": 0.5}, "--held-back is 0.5 of the validation images"),
        ({"split_seed": 1}, "--split-seed is 1"),
    ):
        with pytest.raises(ValueError, match=f"{flag}, but --policy .* was learned on digits"):
            train(tmp_path / "run", method="dada", policy=found, **changes)
    said = told(tmp_path / "run", policy=file, epochs=1)
    assert "4 steps of 50 images; into" in said, "no updates of a policy that is not learned"


def test_the_same_seed_gives_the_same_run_and_another_one_another(uninterrupted: Path, tmp_path: Path) -> None:
    train(tmp_path / "again")
    assert_same_end(tmp_path / "again", uninterrupted)
    train(tmp_path / "other", seed=1)
    assert rows(tmp_path / "other") != rows(uninterrupted)


@pytest.mark.parametrize("after", [1, 4, 6, 11])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_where_it_can_go_on(after: int, signum: int, uninterrupted: Path, tmp_path: Path) -> None:
    """Midway through an epoch, at its end, and in the last one."""
    out = tmp_path / "run"
    with stopping(after, signum):
        train(out)
    state = sealed.load(out / checkpoint.LAST, "checkpoint")
    assert (state["epoch"], state["step"]) == divmod(after, 4)
    train(out, resume=True)
    assert_same_end(out, uninterrupted)


class StopAtTheEnd(Stop):
    """Sends the signal when the last checkpoint is written, and the trainer asks no more."""

    def ended(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize(("moment", "seen"), [("before", []), ("first batch", [300]), ("last batch", [300, 297])])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_epoch_leaves_the_test_pass_to_resume(
    moment: str, seen: list[int], signum: int, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came before it was lost; one that came within it ended the program without a word."""
    out, said, once, tested = tmp_path / "run", io.StringIO(), run.once, []

    def halves(*args: Any) -> Iterator[Batch]:
        for images, labels in once(*args, batch=300):
            tested.append(len(labels))
            if tested == seen:
                os.kill(os.getpid(), signum)
            yield images, labels

    with monkeypatch.context() as patch:
        patch.setattr(run, "once", halves)
        if moment == "before":
            patch.setattr(run, "Lines", lambda console: StopAtTheEnd(0, signum))
        with pytest.raises(Interrupted) as stop:
            run.train(small(), Place(out=out), Console(file=said, width=500))
    assert stop.value.signum == signum
    assert tested == seen
    assert "stopped after epoch 3, step 0; nothing is lost, continue with: metaaugment train digits" in said.getvalue()
    assert not (out / "result.json").exists()
    assert_same(final(out), final(uninterrupted))
    train(out, resume=True)
    assert accuracies(out) == accuracies(uninterrupted)


def test_a_result_names_every_commit_it_was_trained_at(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.commit()
    assert sealed.load(stopped / checkpoint.LAST, "checkpoint")["commit"] == [first]
    for commit, after in (("b2", 1), ("b2", 1), ("c3", 99)):
        monkeypatch.setattr(trainer, "commit", lambda name=commit: name)
        monkeypatch.setattr(run, "Lines", lambda console, left=after: Stop(left))
        with contextlib.suppress(Interrupted):
            train(stopped, resume=True)
    told = json.loads((stopped / "result.json").read_text())["commit"]
    assert told == [first, "b2", "c3"]
    assert learned_policy(stopped).provenance["commit"] == told
    assert machine.continued(machine.continued([], None), None) == ["unknown"], "what was installed"
    assert machine.commits(f"{first}, continued at b2") == [first, "b2"], "as earlier versions wrote it"


def test_the_policy_of_a_run_that_has_not_ended_names_no_machine(stopped: Path) -> None:
    """It may be exported on another one than it is trained on, and its accuracy is not known yet."""
    unfinished = learned_policy(stopped).provenance
    assert unfinished.keys() == {"recipe", "epoch", "data", "commit"}
    train(stopped, resume=True)
    ended, result = learned_policy(stopped).provenance, json.loads((stopped / "result.json").read_text())
    assert ended.keys() - unfinished.keys() == {"machine", "test_accuracy", "val_accuracy"}
    assert ended["machine"] == result["machine"]


def test_whoever_copied_the_code_may_say_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a repository: files of a later commit may have been copied over it."""
    monkeypatch.setenv("METAAUGMENT_COMMIT", "a1")
    assert machine.commit() == "a1"


def test_a_process_keeps_the_commit_of_the_code_that_it_has_loaded(tmp_path: Path) -> None:
    """Runs of one long process were said to be of commits that were made beside it."""
    shutil.copytree(Path(machine.__file__).parents[2], tmp_path / "metaaugment")
    git = "git -c user.name=a -c user.email=a@b"
    subprocess.run(f"git init -q && git add . && {git} commit -qm first", shell=True, cwd=tmp_path, check=True)
    asks = f"""
import os
from metaaugment.lab.training.machine import commit
first = commit()
assert first and os.system("{git} commit -qm second --allow-empty") == 0
assert commit() == first
"""
    subprocess.run([sys.executable, "-c", asks], cwd=tmp_path, check=True)


def test_a_checkpoint_from_before_that_record_is_continued(stopped: Path) -> None:
    state = sealed.load(stopped / checkpoint.LAST, "checkpoint")
    del state["commit"]
    sealed.save(stopped / checkpoint.LAST, "checkpoint", state)
    train(stopped, resume=True)
    told = json.loads((stopped / "result.json").read_text())["commit"]
    assert told == ["unknown", machine.commit()]


@pytest.mark.parametrize("method", ["baseline", "randaugment", "trivialaugment"])
def test_every_method_resumes(method: str, tmp_path: Path) -> None:
    train(tmp_path / "whole", method=method, epochs=2)
    with stopping(3):
        train(tmp_path / "run", method=method, epochs=2)
    train(tmp_path / "run", resume=True, method=method, epochs=2)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("random_epochs", [0, 1])
def test_the_rate_of_the_policy_falls_along_a_cosine(
    random_epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From policy_lr to 0 over all 12 steps, whatever phases there are; also of a run that was stopped between."""
    rates: list[tuple[int, float]] = []

    class Note(Stop):
        def stepped(self, trainer: Trainer) -> None:
            if trainer.policy_optimizer is not None:
                rates.append((trainer.learner.steps, trainer.policy_optimizer.param_groups[0]["lr"]))
            super().stepped(trainer)

    changes: dict[str, Any] = {"policy_schedule": "cosine", "policy_lr": 0.02, "random_epochs": random_epochs}
    for after in (7, 99):
        monkeypatch.setattr(run, "Lines", lambda console, left=after: Note(left))
        with contextlib.suppress(Interrupted):
            train(tmp_path / "run", resume=after == 99, **changes)
    assert [step for step, _ in rates] == list(range(1 + 4 * random_epochs, 13))
    assert [rate for _, rate in rates] == pytest.approx(
        [0.02 * math.cos(math.pi * (step - 1) / 24) ** 2 for step, _ in rates]
    )
    monkeypatch.undo()
    train(tmp_path / "whole", **changes)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    train(tmp_path / "constant", **{**changes, "policy_schedule": "constant"})
    assert rows(tmp_path / "constant") != rows(tmp_path / "whole")


def test_alpha_is_the_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step, learned by nobody; the policy is learned all the same, also after a stop."""
    changes: dict[str, Any] = {"real_alpha": True, "policy_lr": 0.02}
    found: list[tuple[float, float]] = []

    class Note(Stop):
        def stepped(self, trainer: Trainer) -> None:
            found.append((float(trainer.learner.alpha), trainer.optimizer.param_groups[0]["lr"]))
            assert trainer.learner.alpha not in set(trainer.learner.policy_parameters())
            super().stepped(trainer)

    for after in (6, 99):
        monkeypatch.setattr(run, "Lines", lambda console, left=after: Note(left))
        with contextlib.suppress(Interrupted):
            train(tmp_path / "run", resume=after == 99, **changes)
    monkeypatch.undo()
    assert len(found) == 12
    assert [alpha for alpha, _ in found] == pytest.approx([rate for _, rate in found])
    assert found[0][1] == 0.1 > found[-1][1] > 0
    train(tmp_path / "whole", **changes)
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    train(tmp_path / "still", **{**changes, "policy_lr": 0.0})
    learned, still = (final(tmp_path / name)["learner"]["policy"] for name in ("whole", "still"))
    assert any(not torch.equal(learned[name], still[name]) for name in still)


PHASES = {"epochs": 3, "random_epochs": 1, "frozen_epochs": 1, "every": 1}


@pytest.mark.parametrize("after", [2, 4, 6, 8, 10])
def test_three_phases_are_one_resumable_run(after: int, tmp_path: Path) -> None:
    """Random, joint, frozen: one momentum and one cosine through all; also stopped just between two of them."""
    train(tmp_path / "whole", **PHASES)
    with stopping(after):
        train(tmp_path / "run", **PHASES)
    train(tmp_path / "run", resume=True, **PHASES)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("after", [3, 7, 11])
def test_three_phases_on_image_files(after: int, tmp_path: Path) -> None:
    """Stopped within each phase: what files are read, and how they are cropped, goes on where it was."""
    root = write_folder(tmp_path / "images", {"cat": 24, "dog": 24}, side=24)
    phases = {**PHASES, "network": "small-cnn", "size": 16, "batch": 8}  # four steps an epoch

    def files(out: Path, resume: bool = False) -> None:
        recipe = replace(RECIPES["folder"](), **phases)
        place = Place(data=root, resume=out, workers=0) if resume else Place(data=root, out=out, workers=0)
        run.train(recipe, place, QUIET)

    files(tmp_path / "whole")
    with stopping(after):
        files(tmp_path / "run")
    files(tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_skipped_steps_are_counted_through_all_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each epoch, which is a phase of its own."""

    class Skips(Watcher):
        def stepped(self, trainer: Trainer) -> None:
            trainer.learner.guard.count += trainer.step == 2

    monkeypatch.setattr(run, "Lines", lambda console: Skips())
    train(tmp_path / "run", **PHASES)
    assert [row["skipped"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_a_frozen_phase_goes_on_from_a_checkpoint_that_has_tallies(tmp_path: Path) -> None:
    """Versions in which a fixed p had tallies, though nothing was counted, wrote those of each process."""
    place = Place(device="cpu")
    training = run.trainer(run.prepare(small(**PHASES), place, QUIET), place, tmp_path, Reader(), ())
    training.learner, training.policy_optimizer = training._begin(2, None)
    state = training.state_dict()
    training.load_state_dict(state | {"epoch": 2, "tallies": [torch.zeros(3, 2, 14, 14)]})
    assert_same(training.state_dict()["learner"], state["learner"])


def test_steps_are_made_once_for_each_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured stays captured when batches start anew, as in a search that takes up one run after another."""
    made = []
    monkeypatch.setattr(trainer, "step_of", lambda learner, *_, **__: made.append(learner))
    place = Place(device="cpu")
    training = run.trainer(run.prepare(small(**PHASES), place, QUIET), place, tmp_path, Reader(), ())
    for epoch in range(3):
        training.learner, training.policy_optimizer = training._begin(epoch, training.learner)
        training._start_streams()
        training._start_streams()
    assert len(made) == len({id(learner) for learner in made}) == 3


def test_momentum_comes_back_in_the_layout_of_its_parameter(tmp_path: Path) -> None:
    """Fused steps refuse others, as a run on a GPU, whose networks are channels_last, once did when it went on."""

    def trainer() -> Trainer:
        parts = run.prepare(small(), Place(device="cpu"), QUIET)
        parts.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return run.trainer(parts, Place(device="cpu"), tmp_path, Reader(), [Stop(3)])

    tmp_path.mkdir(exist_ok=True)
    first, second = trainer(), trainer()
    with pytest.raises(Interrupted):
        first.run()
    second.resume()
    laid_out = [w for w in second.network.parameters() if w.stride() != w.contiguous().stride()]
    assert laid_out  # otherwise nothing is shown
    for old, new in zip(first.network.parameters(), second.network.parameters(), strict=True):
        momentum = second.optimizer.state[new]["momentum_buffer"]
        assert momentum.stride() == new.stride()
        assert torch.equal(momentum, first.optimizer.state[old]["momentum_buffer"])


@pytest.mark.gpu
def test_a_run_on_a_gpu_goes_on_after_a_signal(tmp_path: Path) -> None:
    """Captured, under bf16: not bit for bit, but to its end, and with the policy still learning."""
    with stopping(10):
        run.train(small(epochs=6), Place(out=tmp_path / "run", device="cuda"), QUIET)
    before = rows(tmp_path / "run")
    run.train(small(epochs=6), Place(resume=tmp_path / "run", device="cuda"), QUIET)
    after = rows(tmp_path / "run")
    assert after[: len(before)] == before
    assert len(after) == 6
    assert after[-1]["alpha"] != before[-1]["alpha"]
    assert all(row["skipped"] == 0 for row in after)


# -- damaged ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run with two checkpoints, at steps 4 and 6."""
    out = tmp_path / "stopped"
    with stopping(6):
        train(out)
    return out


def test_full_memory_says_nothing_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="allocate memory"), checkpoint.understood(tmp_path):
        torch.empty(2**60, dtype=torch.uint8)


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda was: was[: len(was) // 2],
    "flip": lambda was: was[: len(was) * 2 // 3] + bytes([was[len(was) * 2 // 3] ^ 1]) + was[len(was) * 2 // 3 + 1 :],
    "empty": lambda was: b"",
    "a pickle": lambda was: b"\x80\x04K\x01.",
    "missing": lambda was: None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_there(
    damage: str, stopped: Path, uninterrupted: Path
) -> None:
    last, before = stopped / checkpoint.LAST, stopped / checkpoint.BEFORE
    content = DAMAGE[damage](last.read_bytes())
    last.unlink()
    if content is not None:
        last.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint.safetensors is .*the checkpoint before it is intact, after ep"):
        train(stopped, resume=True)
    assert (last.read_bytes() if last.exists() else None) == content, "nothing is overwritten"
    if damage == "empty":
        kept = before.read_bytes()
        before.unlink()
        with pytest.raises(ValueError, match="there is no other checkpoint; start the run again"):
            train(stopped, resume=True)
        before.write_bytes(kept)
    before.replace(last)
    train(stopped, resume=True)
    assert_same_end(stopped, uninterrupted)


@pytest.mark.parametrize("damage", ["", "garbage", '{"a": 1}\n', "[]\n"])
def test_the_log_is_made_again_from_the_checkpoint(damage: str, stopped: Path, uninterrupted: Path) -> None:
    (stopped / "log.jsonl").write_text(damage)
    assert train(stopped, resume=True)["epochs"] == 3
    assert rows(stopped) == rows(uninterrupted)


@pytest.mark.parametrize(
    "content", ["[]", "null", "{", '{"epochs": "two"}', '{"network": [1]}', '{"policy": 3}', '{"lr": null}', '{"x": 1}']
)
def test_a_damaged_recipe_is_named(content: str, stopped: Path) -> None:
    file = stopped / "recipe.json"
    values = json.loads(file.read_text())
    broken = {**values, **json.loads(content)} if content.startswith('{"') else None
    file.write_text(json.dumps(broken) if broken else content)
    with pytest.raises(ValueError, match=r"recipe.json (is damaged|cannot be understood): "):
        train(stopped, resume=True)


@dataclass(frozen=True)
class Of:
    number: float
    some: list[int] | None = None
    by_size: dict[int, Annotated[float, Within(0, 1)]] = field(default_factory=dict)
    way: Literal["up", "down"] = "up"
    place: Path | None = None
    inner: "Of | None" = None


def test_what_a_file_holds_is_read_by_its_types(tmp_path: Path) -> None:
    values = {"number": 2, "some": [1, 2], "by_size": {"8": 1}, "way": "down", "place": "a", "inner": {"number": 1e308}}
    read = Of(2.0, [1, 2], {8: 1.0}, "down", Path("a"), Of(1e308))
    write_json(tmp_path / "of", {**values, "more": 3})
    assert read_as(Of, tmp_path / "of") == read
    assert type(read.number) is float


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"number": "2"}, "number"), ({"number": True}, "number"), ({"number": math.nan}, "number"),
        ({"number": 10**400}, "number"), ({"number": None}, "number"), ({"some": 3}, "some"), ({"some": [1.5]}, "some"),
        ({"by_size": {"a": 1}}, "by_size"), ({"by_size": {"8": 2}}, "by_size.8"), ({"by_size": []}, "by_size"),
        ({"way": "left"}, "way"), ({"way": []}, "way"), ({"place": 3}, "place"), ({"inner": {}}, "inner"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_by_its_file_and_field(wrong: dict[str, Any], name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "of", {"number": 1, **wrong})
    with pytest.raises(Damaged, match=rf"of is damaged: its field '{name}' is .*, which is not a valid value; restore"):
        read_as(Of, tmp_path / "of")
    write_json(tmp_path / "of", {})
    with pytest.raises(Damaged, match="of is damaged: its field 'number' is missing"):
        read_as(Of, tmp_path / "of")


def test_another_precision_is_refused(stopped: Path) -> None:
    with pytest.raises(ValueError, match="its precision is 'float32', not 'bf16'"):
        run.train(small(), Place(resume=stopped, precision="bf16"), QUIET)


def test_a_run_without_a_checkpoint_starts_over(uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.json").write_text(json.dumps(small().to_json()))
    (out / "log.jsonl").write_text('{"epoch": 1, "half a l')
    train(out, resume=True)
    assert rows(out) == rows(uninterrupted)


def test_a_run_that_died_before_it_began_is_begun_by_the_same_command(uninterrupted: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("")
    (tmp_path / "run" / ".recipe.json.part").write_text('{"na')
    train(tmp_path / "run")
    assert rows(tmp_path / "run") == rows(uninterrupted)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_refused(stopped: Path, tmp_path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.json").write_text(json.dumps(small(lr=0.05).to_json()))
    (tmp_path / "other" / checkpoint.LAST).write_bytes((stopped / checkpoint.LAST).read_bytes())
    with pytest.raises(ValueError, match=r"belongs to another run: its lr is 0\.1, not 0\.05; continue it with"):
        train(tmp_path / "other", resume=True, lr=0.05)


def test_resuming_under_another_flag_or_recipe_is_refused(stopped: Path) -> None:
    with pytest.raises(ValueError, match=r"--lr is 0\.07, but .* was begun with 0\.1; leave out the flag"):
        train(stopped, resume=True, lr=0.07)
    with pytest.raises(ValueError, match="is a run of digits, not of omniglot-wrn-40-2"):
        run.train(RECIPES["omniglot-wrn-40-2"](), Place(resume=stopped), QUIET)


def test_a_policy_that_has_moved_can_be_named_again_and_no_other(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content: a run under it goes on from any folder, and where it lies elsewhere now."""
    monkeypatch.chdir(tmp_path)
    policy, file = learned_policy(uninterrupted), Path("policy.safetensors")
    policy.save(file)
    train(Path("whole"), policy=file)
    with monkeypatch.context() as patch:
        patch.setattr(run, "Lines", lambda console: Stop(6))
        for out in ("anywhere", "moved"):
            with pytest.raises(Interrupted):
                train(Path(out), policy=file)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    train(tmp_path / "anywhere", resume=True)
    (tmp_path / file).rename("renamed.safetensors")
    with pytest.raises(ValueError, match=r"policy\.safetensors cannot be read .*; name a policy file"):
        train(tmp_path / "moved", resume=True)
    other = LearnedPolicy(policy.probabilities, replace(policy.source, mean=(0.0,) * 3), *policy.modules)
    other.save("other.safetensors")
    with pytest.raises(ValueError, match=r"belongs to another run: its policy_sha256 is '[0-9a-f]{16}', not"):
        train(tmp_path / "moved", resume=True, policy=Path("other.safetensors"))
    assert json.loads((tmp_path / "moved" / "recipe.json").read_text())["policy"] == str(tmp_path / file)
    train(tmp_path / "moved", resume=True, policy=Path("renamed.safetensors"))
    for out in ("anywhere", "moved"):
        assert rows(tmp_path / out) == rows(tmp_path / "whole")
        assert_same(final(tmp_path / out)["network"], final(tmp_path / "whole")["network"])


def test_a_finished_run_is_told_where_its_policy_lies_and_is_looked_at_under_no_other(
    uninterrupted: Path, tmp_path: Path
) -> None:
    """Told "finished already", it went on naming the old file; diagnosed, it was so under whatever the file held."""
    policy, file, moved = learned_policy(uninterrupted), tmp_path / "policy.safetensors", tmp_path / "moved.safetensors"
    policy.save(file)
    result = train(tmp_path / "run", policy=file)
    recorded = tmp_path / "run" / "recipe.json"
    file.rename(moved)
    policy.sampler_only().save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"belongs to another run: its policy_sha256 is '[0-9a-f]{16}', not"):
        train(tmp_path / "run", resume=True, policy=tmp_path / "other.safetensors")
    assert json.loads(recorded.read_text())["policy"] == str(file)
    assert train(tmp_path / "run", resume=True, policy=moved) == result
    assert json.loads(recorded.read_text())["policy"] == str(moved)
    run.as_it_was(tmp_path / "run", Place(), QUIET)
    policy.sampler_only().save(moved)
    with pytest.raises(ValueError, match=rf"was trained under another policy than {moved} is now; put that"):
        run.as_it_was(tmp_path / "run", Place(), QUIET)


def test_a_checkpoint_leaves_out_what_the_policy_file_holds(uninterrupted: Path, tmp_path: Path) -> None:
    """A policy of WRN-28-10 made the checkpoint of a WRN-40-2 eight times as large; older ones have it."""
    file = tmp_path / "policy.safetensors"
    policy = learned_policy(uninterrupted)
    policy.save(file)
    train(tmp_path / "whole", policy=file)
    with stopping(6):
        train(tmp_path / "run", policy=file)
    state = sealed.load(tmp_path / "run" / checkpoint.LAST, "checkpoint")
    assert state["learner"].keys() == {"alpha", "steps", "skipped", "rank", "sampler"}
    _, frozen, extractor = policy.parts()
    assert extractor is not None
    state["learner"] |= {"policy": frozen.state_dict(), "extractor": extractor.state_dict()}
    sealed.save(tmp_path / "run" / checkpoint.LAST, "checkpoint", state)
    train(tmp_path / "run", resume=True)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("left", [200, 199, 3])
def test_resuming_on_other_data_is_refused(left: int, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed pixel; also fewer images, even than a mini-batch: --batch stays what the run began with."""
    dataset = experiment.dataset

    def other(*args: Any, **options: Any) -> Any:
        data = dataset(*args, **options)
        data.train.images[0, 0, 0, 0] ^= 1
        return replace(data, train=data.train.take(torch.arange(left)))

    monkeypatch.setattr(experiment, "dataset", other)
    with pytest.raises(ValueError, match="belongs to a run on other data: images were added, removed or changed"):
        train(stopped, resume=True)


def test_two_processes_cannot_train_into_one_folder(stopped: Path) -> None:
    lock = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", lock, str(stopped / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ValueError, match="another process is training into"):
            train(stopped, resume=True)
        other.kill()


def test_a_signal_is_noted_in_all_contexts() -> None:
    """One that came to a training at its very end, or while it was being set up, was lost to the search around it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Interruption() as outer:
        handler = signal.getsignal(signal.SIGTERM)
        with Interruption():
            pass
        assert (outer.signum, signal.getsignal(signal.SIGTERM)) == (None, handler)
        with Interruption() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.signum == signal.SIGTERM
        assert outer.signum == signal.SIGTERM
        with Interruption() as later:
            assert later.signum == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert {number: signal.getsignal(number) for number in before} == before
    with Interruption() as another:
        assert another.signum is None


@pytest.mark.parametrize("around", [False, True])
def test_a_second_signal_is_the_ordinary_one(around: bool) -> None:
    """Also where a search around the training would note it."""
    # Whoever runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() if around else contextlib.nullcontext():
            with Interruption() as interruption:
                os.kill(os.getpid(), signal.SIGINT)
                assert interruption.signum == signal.SIGINT
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
