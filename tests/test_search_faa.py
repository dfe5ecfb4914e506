"""Fast AutoAugment's search: its folds, its objective, what TPE learns, and that nothing ends it before its time."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from sqlalchemy import MetaData
from torch import Tensor, nn

import metaaugment as ma
from metaaugment.files.lock import FileLock
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import Function, SubPolicies, SubPolicySampler
from metaaugment.lab.data import DataSet, Images, dataset
from metaaugment.lab.data.batches import Reader
from metaaugment.lab.experiments import run
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.search import faa, studies
from metaaugment.lab.search.crew import Crew
from metaaugment.lab.search.faa import Settings, propose
from metaaugment.lab.search.fold import Fold, divide
from metaaugment.lab.search.run import SEARCHES, search
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.ops import PAPER_OPS

import searches
from endings import Killed
from processes import until
from searches import QUIET, Moment, assert_goes_on, dying, in_order, killed, rows, searched

FAA = SEARCHES["faa"]
RECIPE = replace(RECIPES["digits"](), method="faa", per_class=10, epochs=4, batch=20)
SMALL = Settings(folds=2, trials=6, sub_policies=2, best=2, draws=1)


def found(folder: Path, settings: Settings = SMALL, resume: bool = False) -> SubPolicies:
    policy = published.find(searched(RECIPE, settings, folder, resume))
    assert isinstance(policy, SubPolicies)
    return policy


laboratory = partial(searches.laboratory, recipe=RECIPE)


def test_studies_are_found_again_by_another_version(tmp_path: Path) -> None:
    """By the recipe as it was written down, whatever fields this version has."""
    lab, settings = laboratory(tmp_path), faa.Settings()
    key, recipe = faa._key(lab, settings), RECIPE.to_json()
    (tmp_path / "search.json").write_text(json.dumps({"recipe": recipe}))
    assert faa._key(lab, settings) == key
    (tmp_path / "search.json").write_text(json.dumps({"recipe": recipe | {"power": 1.0}}))
    assert faa._key(lab, settings) != key


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("faa") / "whole"
    found(folder)
    return folder


# -- folds ------------------------------------------------------------------------------------------------------------


def test_a_fold_is_disjoint_covers_the_training_images_and_has_every_class_in_proportion() -> None:
    labels = dataset("digits").train.labels
    trained, judged = divide(labels, 0.4, seed=3)
    assert sorted([*trained.tolist(), *judged.tolist()]) == list(range(len(labels)))
    assert len(judged) == round(0.4 * len(labels))
    for digit in range(10):
        assert abs(int((labels[judged] == digit).sum()) - 0.4 * int((labels == digit).sum())) < 1
    assert not torch.equal(judged, divide(labels, 0.4, seed=4)[1])


def test_omniglots_fifteen_drawings_are_nine_and_six() -> None:
    labels = torch.arange(1623).repeat(15)
    trained, judged = divide(labels, 0.4, seed=0)
    assert set(labels[trained].bincount().tolist()) == {9}
    assert set(labels[judged].bincount().tolist()) == {6}


# -- the objective ----------------------------------------------------------------------------------------------------


def policy_of(*pairs: tuple[Function, Function]) -> SubPolicies:
    return SubPolicies("faa", "a test", "faa", 1, pairs)


def test_a_policy_of_probability_0_scores_the_plain_cross_entropy(tmp_path: Path) -> None:
    fold = faa.train(laboratory(tmp_path), SMALL, 0)
    never = policy_of((Function("Solarize", 0, 0), Function("Rotate", 0, 1)))
    images, labels = fold.data.val.images, fold.data.val.labels
    with torch.no_grad():
        loss = F.cross_entropy(fold.network.eval()(fold.prepare(images)), labels)
    assert fold.objective(never, seed=5) == fold.objective() == pytest.approx(-float(loss), rel=1e-6)


def test_a_policy_of_probability_1_scores_what_pictures_changed_by_hand_score(tmp_path: Path) -> None:
    fold = faa.train(laboratory(tmp_path), SMALL, 0)
    # Fast AutoAugment's Solarize at level 0 inverts every pixel.
    invert = policy_of((Function("Solarize", 1, 0), Function("Identity", 1)))
    with torch.no_grad():
        loss = F.cross_entropy(fold.network.eval()(fold.prepare(255 - fold.data.val.images)), fold.data.val.labels)
    assert fold.objective(invert) == pytest.approx(-float(loss), rel=1e-6)
    assert fold.objective(invert) < fold.objective()


def test_of_several_draws_the_best_one_of_each_image_counts(tmp_path: Path) -> None:
    """By hand, from the same draws: the least of three losses an image, and so never a worse score than of one draw."""
    fold = faa.train(laboratory(tmp_path), SMALL, 0)
    policy = policy_of((Function("Rotate", 0.7, 0.9), Function("Solarize", 0.5, 0.3)))
    generator, sampler = torch.Generator().manual_seed(5), SubPolicySampler(policy)
    images, labels = fold.data.val.images, fold.data.val.labels
    losses = []
    for _ in range(3):
        augmented = ma.apply(images, sampler.sample(len(images), generator), "faa", fold.data.fill)
        with torch.no_grad():
            logits = fold.network.eval()(fold.prepare(augmented))
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
    expected = torch.stack(losses).min(0).values.mean()
    assert fold.objective(policy, 5, 3) == pytest.approx(-float(expected), rel=1e-6)
    assert fold.objective(policy, 5, 1) == pytest.approx(-float(losses[0].mean()), rel=1e-6)
    assert fold.objective(policy, 5, 3) > fold.objective(policy, 5, 1)


def test_the_network_of_a_fold_is_trained_plainly_and_only_on_its_share(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    fold = faa.train(lab, SMALL, 1)
    assert len(fold.data.train) + len(fold.data.val) == len(lab.data.train)
    pictures = {image.numpy().tobytes() for image in fold.data.train.images}
    assert pictures.isdisjoint(image.numpy().tobytes() for image in fold.data.val.images)
    trainer = lab.trainer(lab.experiment(fold.data, method="baseline"), tmp_path / "again")
    trainer.run()
    for again, once in zip(trainer.network.parameters(), fold.network.parameters(), strict=True):
        assert torch.equal(again, once)


# -- what TPE learns --------------------------------------------------------------------------------------------------


class Black(nn.Module):
    """Is sure of class 0 unless an image is black."""

    def forward(self, images: Tensor) -> Tensor:
        right = images.mean(dim=(1, 2, 3)) > 0.004
        return torch.stack([8.0 * right, 8.0 * ~right], dim=1)


def white_images(n: int) -> DataSet:
    """White, as is what geometry uncovers: of all 14 functions Solarize alone makes them black."""
    white = Images(torch.full((n, 3, 8, 8), 255, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))
    return DataSet("white", white, white, white, ("white", "black"), (0.0,) * 3, (1.0,) * 3, (255,) * 3)


def planted(data: DataSet) -> Fold:
    nothing = contextlib.nullcontext
    return Fold(0, Black(), data, data.val, torch.device("cpu"), lambda images: images / 255, nothing, Reader())


@pytest.mark.parametrize("name", [op.name for op in PAPER_OPS])
def test_solarize_alone_is_planted_as_harmful(name: str) -> None:
    fold = planted(white_images(4))
    scores = [fold.objective(policy_of((Function(name, 1, level), Function("Identity", 1)))) for level in (0, 0.5, 0.9)]
    assert all(score < -7 for score in scores) if name == "Solarize" else all(score > -0.01 for score in scores)


def test_tpe_learns_to_leave_out_the_one_function_that_is_harmful(tmp_path: Path) -> None:
    data, settings = white_images(100), Settings(trials=80, sub_policies=2, draws=1)
    study = optuna.create_study(direction="maximize")
    faa.search(laboratory(tmp_path, data=data), settings, planted(data), study)
    policies = [propose(trial, 2) for trial in study.trials]

    def use(some: list[SubPolicies]) -> float:
        functions = [function for policy in some for pair in policy.sub_policies for function in pair]
        return sum(function.probability for function in functions if function.name == "Solarize") / len(functions)

    assert use(policies[faa.RANDOM_TRIALS :]) < use(policies[: faa.RANDOM_TRIALS]) / 2


def test_the_objective_rises_over_that_of_the_first_tenth(tmp_path: Path) -> None:
    found(tmp_path / "search", replace(SMALL, folds=1, trials=60))
    objectives = [row["objective"] for row in rows(tmp_path / "search") if row["number"] > 0]
    assert len(objectives) == 60
    assert sum(objectives[-6:]) > sum(objectives[:6])
    assert max(objectives[6:]) > max(objectives[:6])


# -- the policy -------------------------------------------------------------------------------------------------------


def test_the_policy_has_the_best_of_each_fold_and_trains(uninterrupted: Path, tmp_path: Path) -> None:
    policy = published.find(uninterrupted / "policy.json")
    best = []
    for fold in range(2):
        tried = [row for row in rows(uninterrupted) if row["fold"] == fold and row["number"] > 0]
        assert len(tried) == 6
        for row in sorted(tried, key=lambda row: -row["objective"])[:2]:
            best += row["sub_policies"]
    names = [[function[0] for function in pair] for pair in best]
    kept = [pair for place, pair in enumerate(best) if place % 2 == 0 or names[place] != names[place - 1]]
    assert published.encode(policy)["sub_policies"] == kept
    recipe = replace(RECIPE, epochs=1, policy=uninterrupted / "policy.json")
    result = run.train(recipe, Place(out=tmp_path / "run", device="cpu"), QUIET)
    assert result["method"] == "faa"
    assert result["epochs"] == 1


def test_of_sub_policies_with_the_same_functions_in_a_policy_the_first_is_kept(tmp_path: Path) -> None:
    study = optuna.create_study(direction="maximize")
    two = [("Rotate", 0.5, 0.1), ("Color", 0.5, 0.1)], [("Rotate", 0.6, 0.2), ("Color", 0.6, 0.2)]
    for place, (pairs, value) in enumerate(((two, 1.0), ((two[1], two[0]), 2.0), ((two[0], two[0]), 0.0))):
        study.enqueue_trial({
            f"{kind}-{n}-{which}": number
            for n, pair in enumerate(pairs)
            for which, function in zip(("first", "second"), pair, strict=True)
            for kind, number in zip(("function", "probability", "level"), function, strict=True)
        })  # fmt: skip
        trial = study.ask()
        trial.set_user_attr("place", place)
        propose(trial, 2)
        study.tell(trial, value)
    policy = faa._found(laboratory(tmp_path), replace(SMALL, best=3), [study])
    # Of the best trial the second pair, of the next one the first; the last one repeats that.
    assert policy.sub_policies == tuple(tuple(Function(*function) for function in pair) for pair in (two[1], two[0]))


def test_a_function_without_a_level_has_none() -> None:
    params = {"function-0-first": "Equalize", "function-0-second": "Rotate"}
    params |= {f"{kind}-0-{which}": 0.7 for kind in ("probability", "level") for which in ("first", "second")}
    policy = propose(optuna.trial.FixedTrial(params), 1)
    assert policy.sub_policies == ((Function("Equalize", 0.7), Function("Rotate", 0.7, 0.7)),)


# -- stopped and gone on with -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [
        (Fold, "objective", 5, False, killed),  # a trial is begun, and its policy drawn
        (Laboratory, "note", 4, False, killed),  # Optuna knows that a trial is finished, the rows do not
        (Laboratory, "note", 8, True, killed),  # the second fold is trained
        (optuna.trial.Trial, "set_user_attr", 9, False, killed),  # a trial is begun, and has no place yet
        (optuna.trial.Trial, "suggest_float", 30, True, killed),  # a policy is drawn by half
        (faa, "_found", 1, False, killed),  # all trials are finished
    ],
)
def test_killed_anywhere_it_finds_the_same_policy(moment: Moment, uninterrupted: Path, tmp_path: Path) -> None:
    assert_goes_on(moment, RECIPE, SMALL, uninterrupted, tmp_path / "search")


def test_at_most_the_trial_in_flight_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, settings = tmp_path / "killed", replace(SMALL, folds=1)
    judged = []
    objective = Fold.objective
    monkeypatch.setattr(Fold, "objective", lambda *args: judged.append(args[2:]) or objective(*args))
    with monkeypatch.context() as patched:
        patched.setattr(Fold, "objective", dying(Fold.objective, 4, after=True))
        with pytest.raises(Killed):
            found(folder, settings)
    found(folder, settings, resume=True)
    # Without a policy, three trials, and those again but two that were known.
    assert len(judged) == 1 + 3 + (6 - 2)
    assert len(set(judged)) == 1 + 6


def test_a_journal_torn_by_a_kill_is_gone_on_with(uninterrupted: Path, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "killed"
    monkeypatch.setattr(Fold, "objective", dying(Fold.objective, 4, after=False))
    with pytest.raises(Killed):
        found(folder)
    monkeypatch.undo()
    with (folder / studies.STUDIES).open("ab") as journal:
        journal.write(b'{"op_code":5,"worker_id":')
    with (folder / "trials.jsonl").open("ab") as lines:
        lines.write(b'{"trial": 3, "fold": 0, "nu')
    assert found(folder, resume=True) == published.find(uninterrupted / "policy.json")
    assert in_order(folder) == in_order(uninterrupted)


def test_asked_to_stop_it_stops_between_trials(tmp_path: Path) -> None:
    lab = laboratory(tmp_path)
    lab.interruption.signum = signal.SIGTERM
    with pytest.raises(Interrupted):
        faa.find(lab, SMALL)
    assert lab.trials() == []


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_says_what_is_trained_and_how_far_it_is(
    processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = replace(SMALL, trials=5, processes=processes)
    place = Place(device="cpu", out=tmp_path / "s")
    search(FAA, replace(RECIPE, epochs=20), settings, place, Console(soft_wrap=True))
    first, *said = capsys.readouterr().out.splitlines()
    assert first == (
        "2 of 2 folds to train: small-cnn for 20 epochs on 60 images each; "
        "then 5 trials on the 40 images held out of each"
    )
    epochs = [line.split(";")[0] for line in said if "epoch" in line]
    every_other = [f"fold {fold}: epoch {epoch} of 20" for fold in range(2) for epoch in range(2, 21, 2)]
    assert epochs == (every_other if processes == 1 else [])
    for fold in range(2):
        assert sum(line.startswith(f"fold {fold}: trained; loss ") for line in said) == 1
    assert any(line.startswith("10 of 10 trials; fold 0: least loss ") for line in said)
    assert said[-1].startswith("10 trials and 2 trainings of a network, ")


def test_what_is_trained_already_is_not_announced(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "s")
    (tmp_path / "s" / "policy.json").unlink()
    search(FAA, RECIPE, SMALL, Place(device="cpu", resume=tmp_path / "s"), Console(soft_wrap=True))
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("12 trials and 2 trainings of a network, ")


# -- several processes ------------------------------------------------------------------------------------------------


def test_two_processes_of_which_one_is_killed_end_with_all_trials_and_a_file(tmp_path: Path) -> None:
    folder, settings = tmp_path / "search", Settings(folds=1, trials=40, sub_policies=2, best=3, processes=2)
    killed = []

    def kill_one() -> None:
        until(folder.exists)
        with FileLock(folder / "claims.lock"):  # neither begins a trial before both are there
            until(lambda: len(writers(folder, "study_name")) == 3)
        until(lambda: len(writers(folder, "place")) == 2)
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid or 0, signal.SIGKILL)
        killed.append(worker)

    threading.Thread(target=kill_one, daemon=True).start()
    policy = found(folder, settings)
    assert [worker.exitcode for worker in killed] == [-signal.SIGKILL]
    assert 1 <= len(policy.sub_policies) <= 6
    assert [row["number"] for row in in_order(folder)] == list(range(41))
    assert [row["trial"] for row in in_order(folder)] == list(range(41))


def writers(folder: Path, word: str) -> set[str]:
    """Processes that have written a line with this word into Optuna's journal."""
    file = folder / studies.STUDIES
    lines = file.read_text().splitlines() if file.exists() else []
    return {line.split('"worker_id":"')[1].split('"')[0] for line in lines if f'"{word}"' in line}


def test_what_a_process_has_to_say_reaches_the_user_as_one_sentence(tmp_path: Path) -> None:
    # The place where a network would be trained is taken.
    (tmp_path / "fold-0").write_text("")
    crew = Crew(laboratory(tmp_path), 1, faa._Folds, (replace(SMALL, folds=1), "key"))
    with pytest.raises(OSError, match="fold-0"), crew:
        list(crew.do([0]))


def test_machines_that_share_a_database_share_their_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMALL, folds=1, storage=f"sqlite:///{tmp_path / 'studies.db'}")
    first = found(tmp_path / "first", settings)
    judged = []
    objective = Fold.objective
    monkeypatch.setattr(Fold, "objective", lambda *args: judged.append(args[1:]) or objective(*args))
    assert found(tmp_path / "second", settings).sub_policies == first.sub_policies
    assert judged == []
    assert [row["number"] for row in rows(tmp_path / "second")] == list(range(1, 7))


def test_a_database_that_another_machine_is_just_creating_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find no tables, and the second to create them is refused."""
    url, tables, create = f"sqlite:///{tmp_path / 'studies.db'}", MetaData.create_all, optuna.create_study

    def overtaken(metadata: MetaData, engine: Any, *more: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(studies, "MOMENT", 0.0)
        create(storage=url)
        tables(metadata, engine, checkfirst=False)

    monkeypatch.setattr(MetaData, "create_all", overtaken)
    (study,) = studies.open_studies(tmp_path, url, ["mine"])
    assert study.study_name == "mine"


@pytest.mark.parametrize("alive", [True, False])
def test_a_trial_of_another_machine_is_waited_for_until_that_must_be_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    study, waited = optuna.create_study(direction="maximize"), []
    theirs = study.ask()
    theirs.set_user_attr("place", 0)

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if alive and len(waited) == 5:
            theirs.set_user_attr("seconds", 5.0)
            study.tell(theirs, 1.0)

    monkeypatch.setattr(faa.time, "sleep", sleep)
    monkeypatch.setattr(faa.time, "monotonic", lambda: float(sum(waited)))
    faa._await_others(laboratory(tmp_path), [study])
    assert len(waited) == (5 if alive else 61)
    assert list(studies.finished(study)) == ([0] if alive else [])
    ours = studies.claim(tmp_path, study, SMALL.trials)
    assert ours is not None
    assert ours.user_attrs["place"] == (1 if alive else 0)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["nothing://me:secret@here/studies", "sqlite:////no/such/folder/studies.db"])
def test_a_database_that_cannot_be_opened_gives_one_sentence_without_the_password(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="cannot be opened") as error:
        faa.find(laboratory(tmp_path), replace(SMALL, storage=url))
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_without_optuna_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"the package optuna; install it with: pip install 'metaaugment\[search\]'"):
        faa.find(laboratory(tmp_path), SMALL)


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_a_network_that_diverged_is_refused(tmp_path: Path) -> None:
    lab = replace(laboratory(tmp_path), recipe=replace(RECIPE, lr=1e30))
    with pytest.raises(ValueError, match=r"the network of fold 0 diverged: its loss .* is nan; .* smaller --lr"):
        faa.find(lab, SMALL)


def test_a_trial_is_the_recipes_own_training_of_200_epochs_at_most() -> None:
    for name, epochs in (("digits", 40), ("cifar10-wrn-28-10", 200), ("omniglot-wrn-28-10", 200)):
        recipe = RECIPES[name]()
        assert faa.trial(recipe) == replace(recipe, epochs=epochs)
    assert faa.trial(RECIPES["cifar10-wrn-28-10-mt"]()).copies == 1
