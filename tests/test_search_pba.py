"""The search of population based augmentation: its rules by hand, its search stopped anywhere, and with Ray."""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
import torch
from rich.console import Console

import metaaugment
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import Function, Schedule, Stage
from metaaugment.lab.experiments import run, validity
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import pba, population
from metaaugment.lab.search.population import (
    Functions,
    Interval,
    Workbench,
    exploit,
    explore,
    folder_of,
    go_on_from,
    lineage,
)
from metaaugment.lab.search.run import SEARCHES, search
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training.interruption import Interrupted
from metaaugment.lab.training.trainer import Trainer

import processes
from endings import same
from processes import until
from searches import QUIET, Moment, asked_to_stop, assert_goes_on, in_order, killed, laboratory, rows, searched

SETTINGS = pba.Settings(trials=4, interval=1)
TWO = Functions(("Rotate", "Invert"), "autoaugment", "by hand")


def small(**changes: Any) -> Recipe:
    """Digits of 12 pixels, ten of each: an epoch is two steps."""
    return replace(pba.trial(RECIPES["digits"]()), **{"size": 12, "per_class": 10, "epochs": 4, **changes})


def begin(out: Path, recipe: Recipe, settings: pba.Settings = SETTINGS) -> Path:
    return searched(recipe, settings, out)


def resume(out: Path, recipe: Recipe) -> Path:
    return searched(recipe, SETTINGS, out, resume=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that nothing disturbed."""
    out = tmp_path_factory.mktemp("pba") / "whole"
    begin(out, small())
    return out


# -- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "number"), [(0, 0), (0, 4), (0, 10), (1, 0), (1, 5), (1, 9)])
def test_a_number_is_drawn_anew_with_a_fifth_or_moved_by_up_to_three(place: int, number: int) -> None:
    """Against all cases counted: 11 tenths or 10 levels drawn anew, and eight moves, cut off at the bounds."""
    most, draws, random = (10, 9)[place], 20_000, Random(1)
    expected = Counter(dict.fromkeys(range(most + 1), 0.2 / (most + 1)))
    for move in (0, 1, 2, 3, 0, -1, -2, -3):
        expected[min(most, max(0, number + move))] += 0.8 / 8
    policy = [0, 0, 0, 0]
    policy[2 + place] = number
    seen = Counter(explore(policy, random)[2 + place] for _ in range(draws))
    assert seen.keys() <= expected.keys()
    for value, chance in expected.items():
        assert seen[value] / draws == pytest.approx(chance, abs=5 * (chance * (1 - chance) / draws) ** 0.5)


def test_numbers_change_independently() -> None:
    """One that went from the top to the bottom half was drawn anew: two such are a square as frequent."""
    random, draws = Random(2), 20_000
    far = [[number < 4 for number in explore([10, 9], random)] for _ in range(draws)]
    one, other, both = 0.2 * 4 / 11, 0.2 * 4 / 10, sum(all(pair) for pair in far)
    assert both / draws == pytest.approx(one * other, abs=5 * (one * other / draws) ** 0.5)


def test_the_worst_quarter_goes_on_from_any_of_the_best() -> None:
    objectives = [0.5, 0.9, 0.1, 0.7, 0.2, 0.8, 0.4, 0.6]
    drawn = [exploit(objectives, Random(seed)) for seed in range(50)]
    assert all(pairs.keys() == {2, 4} for pairs in drawn)
    assert {winner for pairs in drawn for winner in pairs.values()} == {1, 5}
    assert {pairs[2] == pairs[4] for pairs in drawn} == {True, False}  # each draws for itself


def test_a_quarter_of_few_trials_is_one_and_never_itself() -> None:
    assert exploit([0.3, 0.3], Random(0)) == {0: 1}
    assert exploit([0.3, 0.1, 0.2], Random(0)) == {1: 0}
    assert len(exploit([0.1 * place for place in range(5)], Random(0))) == 2  # rounded up, as Ray Tune does
    assert len(exploit([0.1 * place for place in range(16)], Random(0))) == 4


# -- from a lineage to a schedule ------------------------------------------------------------------------------------


def test_a_lineage_becomes_a_schedule() -> None:
    first, second = [0, 0, 0, 0, 0, 0, 0, 0], [3, 9, 0, 1, 10, 0, 7, 2]
    schedule = TWO.schedule([first, first, second])
    none = tuple(Function(name, 0.0, 0) for name in ("Rotate", "Invert", "Rotate", "Invert"))
    moved = (("Rotate", 0.3, 9), ("Invert", 0.0, 1), ("Rotate", 1.0, 0), ("Invert", 0.7, 2))
    some = tuple(Function(*function) for function in moved)
    assert schedule.stages == (Stage(2, none), Stage(1, some))
    assert (schedule.system, schedule.space, schedule.max_level) == ("pba", "autoaugment", 10)


def test_the_published_reader_has_the_same_of_the_same_history() -> None:
    """Trial 1 trains for 2 epochs without anything; 0 takes it over and has p, until 2 takes over that one at 5."""
    zero, p, q = [0] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [10, 9, 0, 0, 1, 1, 2, 2]
    log = [["0", "1", 2, 2, zero, p], ["2", "0", 5, 5, p, q]]
    about = {"system": "pba", "source": "by hand", "space": "autoaugment", "max_level": 10, "epochs": 6}
    read = published.decode({**about, "operations": ["Rotate", "Invert"], "log": log})
    assert TWO.schedule([zero] * 2 + [p] * 3 + [q]) == read


def test_functions_are_the_papers_or_the_systems_own() -> None:
    paper = pba._functions(pba.Settings(), small())
    assert (len(paper.names), paper.space, len(paper.start())) == (14, "trivialaugment-wide", 2 * 14 * 2)
    own = pba._functions(pba.Settings(functions="pba"), small())
    released = published.find("pba-svhn")
    assert isinstance(released, Schedule)
    assert own.names * 2 == tuple(function.name for function in released.stages[0].functions)
    assert (own.space, own.schedule([own.start()]).max_level) == (released.space, released.max_level)


# -- a trial ---------------------------------------------------------------------------------------------------------


def test_going_on_from_another_trial_is_going_on_as_it(tmp_path: Path) -> None:
    """Same weights, momentum and draws, bit for bit; and under the same policy, the same next epoch."""
    lab = laboratory(tmp_path, small())
    functions = pba._functions(SETTINGS, lab.recipe)
    start, train = functions.start(), Workbench(lab, functions)
    for trial in range(2):
        train(Interval(trial, start, range(1)))
    before = [state(lab, trial) for trial in range(2)]
    assert not same(*(found["network"] for found in before))  # each has its own initial weights
    go_on_from(folder_of(lab, 1), folder_of(lab, 0))
    copied = state(lab, 1)
    for part in ("network", "optimizers", "generators", "learner"):
        assert same(copied[part], before[0][part])
    policy = explore(start, Random(0))
    assert len({train(Interval(trial, policy, range(1, 2)))[0] for trial in range(2)}) == 1
    after = [state(lab, trial) for trial in range(2)]
    assert same(after[0]["network"], after[1]["network"])
    assert not same(after[0]["network"], before[0]["network"])
    assert lineage(folder_of(lab, 1)) == [start, policy]


def test_a_policy_changes_the_training(tmp_path: Path) -> None:
    functions = pba._functions(SETTINGS, small())
    strong = [10, 9] * (len(functions.start()) // 2)
    trained = []
    for place, policy in enumerate((functions.start(), functions.start(), strong)):
        lab = laboratory(tmp_path / str(place), small())
        Workbench(lab, functions)(Interval(0, policy, range(1)))
        trained.append(state(lab, 0)["network"])
    plain, again, augmented = trained
    assert same(plain, again)
    assert not same(plain, augmented)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_trials_that_take_turns_train_as_if_alone(device: str, tmp_path: Path) -> None:
    """On one workbench, whose captured steps stay captured, against a workbench each; on the CPU bit for bit."""
    recipe = small(epochs=6, per_class=30)
    in_turn, alone = (laboratory(tmp_path / name, recipe, device=device) for name in ("in-turn", "alone"))
    functions = pba._functions(SETTINGS, recipe)
    shared, *own = Workbench(in_turn, functions), Workbench(alone, functions), Workbench(alone, functions)
    for number in range(3):
        policy = explore(functions.start(), Random(number))
        for trial in range(2):
            for train in (shared, own[trial]):
                train(Interval(trial, policy, range(2 * number, 2 * number + 2)))
    for trial in range(2):
        assert lineage(folder_of(alone, trial)) == lineage(folder_of(in_turn, trial))
        found, wanted = (
            torch.cat([w.double().flatten() for w in state(lab, trial)["network"].values()]) for lab in (in_turn, alone)
        )
        # A GPU adds in no fixed order. Of another trial's momentum or policy there would be far more.
        assert float((found - wanted).norm() / wanted.norm()) <= (0.0 if device == "cpu" else 1e-2)
    assert not same(*(state(in_turn, trial)["network"] for trial in range(2)))


def state(lab: Laboratory, trial: int) -> dict[str, Any]:
    found = checkpoint.load(folder_of(lab, trial))
    assert found is not None
    return found


# -- the search ------------------------------------------------------------------------------------------------------


def test_a_search_ends_in_a_schedule_that_trains(whole: Path, tmp_path: Path) -> None:
    found = published.find(whole / "policy.json")
    assert isinstance(found, Schedule)
    assert (found.epochs, found.space) == (4, "trivialaugment-wide")
    assert all(function.probability == 0 for function in found.stages[0].functions)
    recipe = small(policy=whole / "policy.json", epochs=2)
    result = run.train(recipe, Place(out=tmp_path / "run", device="cpu"), QUIET)
    assert (result["method"], result["epochs"]) == ("pba", 2)


def test_it_gets_better_than_in_its_first_tenth(tmp_path: Path) -> None:
    out = tmp_path / "search"
    begin(out, small(per_class=20, epochs=10), replace(SETTINGS, interval=2))
    objectives = [row["objective"] for row in rows(out)]
    tenth = len(objectives) // 10
    assert sum(objectives[-tenth:]) / tenth > sum(objectives[:tenth]) / tenth + 0.1


def test_what_is_noted_is_the_history_of_the_result(whole: Path) -> None:
    """From the rows alone: who was copied is replayed, and the best one's policies are those of the file."""
    noted = rows(whole)
    keys = {"trial", "generation", "epoch", "objective", "policy"}
    assert [row.keys() for row in noted] == [keys] * len(noted)
    assert [(row["generation"], row["trial"]) for row in noted] == [(g, t) for g in range(4) for t in range(4)]
    assert [row["epoch"] for row in noted] == [g + 1 for g in range(4) for _ in range(4)]
    lineages = [[row["policy"]] for row in noted[:4]]
    for g in range(1, 4):
        scores = [row["objective"] for row in noted[4 * g - 4 : 4 * g]]
        worst, best = min(range(4), key=lambda t: scores[t]), max(range(4), key=lambda t: (scores[t], t))
        before = [lineages[best] if t == worst else lineages[t] for t in range(4)]
        lineages = [[*before[t], noted[4 * g + t]["policy"]] for t in range(4)]
        kept = [t for t in range(4) if lineages[t][-1] == before[t][-1]]
        assert [t for t in range(4) if t not in kept] == [worst]
    best = max(noted[-4:], key=lambda row: (row["objective"], row["trial"]))["trial"]
    functions = pba._functions(SETTINGS, small())
    assert published.find(whole / "policy.json") == functions.schedule(lineages[best])


def test_another_seed_finds_another_schedule(whole: Path, tmp_path: Path) -> None:
    file = begin(tmp_path / "other", small(seed=1))
    assert published.find(file) != published.find(whole / "policy.json")


@pytest.mark.parametrize(
    "moment",
    [
        (Laboratory, "note", 6, False, killed),  # trained, but not remembered
        (Laboratory, "note", 8, True, killed),  # the last of its generation: nobody was copied yet
        (population, "go_on_from", 2, True, killed),  # copied, but not written down
        (population, "write_json", 2, True, killed),  # written down, but nobody trained on
        (Trainer, "_add", 13, False, killed),  # within an epoch
        (Laboratory, "note", 5, True, asked_to_stop),
        # After a training has looked for the last time whether it is asked to stop: one in five was lost there.
        (checkpoint.Checkpoints, "settle", 5, True, asked_to_stop),
    ],
)
def test_stopped_anywhere_it_ends_in_the_same_policy(moment: Moment, whole: Path, tmp_path: Path) -> None:
    assert_goes_on(moment, small(), SETTINGS, whole, tmp_path / "search")


def test_killed_for_good_it_ends_in_the_same_policy(whole: Path, tmp_path: Path) -> None:
    """By SIGKILL, within an epoch of the seventh interval."""
    child = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from searches import dying
from test_search_pba import Trainer, begin, small
Trainer._add = dying(Trainer._add, 14, die=lambda: os.kill(os.getpid(), signal.SIGKILL))
begin(Path({str(tmp_path / "search")!r}), small())
"""
    ended = subprocess.run([sys.executable, "-c", child], cwd=Path(__file__).parents[1])
    assert ended.returncode == -signal.SIGKILL
    assert len(rows(tmp_path / "search")) == 6
    assert published.find(resume(tmp_path / "search", small())) == published.find(whole / "policy.json")
    assert len(rows(tmp_path / "search")) == 16


@pytest.mark.parametrize("place", range(4))
def test_a_checkpoint_that_is_put_back_is_made_up_for(place: int, whole: Path, tmp_path: Path) -> None:
    """As the message about a damaged one advises; the schedule lacked an epoch."""
    out = tmp_path / "search"
    shutil.copytree(whole, out)
    (out / "policy.json").unlink()
    folder = out / f"trial-{place:02d}"
    (folder / checkpoint.BEFORE).replace(folder / checkpoint.LAST)
    assert published.find(resume(out, small())) == published.find(whole / "policy.json")
    assert rows(out) == rows(whole)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("trial-02/checkpoint*.safetensors", r"trial-02 has no checkpoint\.safetensors any more; begin another search"),
        ("population.json", r"population\.json is missing; restore it, or begin another search"),
    ],
)
def test_what_is_lost_is_not_begun_again(lost: str, sentence: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "search"
    shutil.copytree(whole, out)
    for file in (out / "policy.json", *out.glob(lost)):
        file.unlink()
    with pytest.raises(ValueError, match=sentence):
        resume(out, small())


def test_it_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(SETTINGS, interval=2)
    place = Place(out=tmp_path / "search", device="cpu")
    search(SEARCHES["pba"], small(epochs=5), settings, place, Console(soft_wrap=True))  # the last interval is shorter
    *said, _ = capsys.readouterr().out.splitlines()
    assert [line.split(" of ")[0] for line in said] == ["2", "3", "4", "5", "6", "8", "9", "10", "11", "12"]
    best = max(row["objective"] for row in rows(tmp_path / "search"))
    assert said[-1] == f"12 of 12 intervals; best validation accuracy {best:.2%}"


# -- several processes -----------------------------------------------------------------------------------------------


LONG = small(epochs=20)  # long enough to be disturbed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a search by one process."""
    out = tmp_path_factory.mktemp("pba") / "alone"
    begin(out, LONG)
    return out


def test_two_processes_of_which_one_is_killed_find_what_one_finds(alone: Path, tmp_path: Path) -> None:
    """The other takes over its trial, from the last checkpoint of it, and each of the rows is that of one process."""
    out, struck = tmp_path / "search", []

    def kill_one() -> None:
        until((out / "population.json").exists)  # in the second generation
        worker = multiprocessing.active_children()[0]
        os.kill(worker.pid or 0, signal.SIGKILL)
        struck.append(worker)

    killer = threading.Thread(target=kill_one)
    killer.start()
    file = begin(out, LONG, replace(SETTINGS, processes=2))
    killer.join()
    assert [worker.exitcode for worker in struck] == [-signal.SIGKILL]
    assert published.find(file) == published.find(alone / "policy.json")
    assert in_order(out) == in_order(alone)


def test_processes_stop_at_a_signal_and_another_number_of_them_goes_on(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "search"

    def ask() -> None:
        until((out / "population.json").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    with pytest.raises(Interrupted):
        begin(out, LONG, replace(SETTINGS, processes=2))
    asker.join()
    assert 4 <= len(rows(out)) < 80
    assert published.find(resume(out, LONG)) == published.find(alone / "policy.json")
    assert in_order(out) == in_order(alone)


# -- what it is asked for --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a gradient is not finite")
def test_a_population_that_diverged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the network in .*trial-.. diverged, though it is the best: .* smaller --lr$"
    ):
        begin(tmp_path / "s", small(lr=1e20, epochs=2), replace(SETTINGS, trials=2))
    assert not (tmp_path / "s" / "policy.json").exists()


def test_a_trial_is_as_in_the_papers() -> None:
    """Ho et al.: 4,000 images of CIFAR, WRN-40-2 for 200 epochs; the paper: two images of 1,623 characters."""
    for name in ("cifar10-wrn-28-10", "cifar10-pyramidnet", "cifar100-wrn-28-10", "omniglot-wrn-28-10"):
        recipe = pba.trial(RECIPES[name]())
        classes = {"cifar10": 10, "cifar100": 100, "omniglot": 1623}[recipe.dataset]
        assert classes * (recipe.per_class or 0) == {"omniglot": 3246}.get(recipe.dataset, 4000)
        assert (recipe.network, recipe.epochs, recipe.lr, recipe.weight_decay) == ("wrn-40-2", 200, 0.1, 5e-4)
        validity.check(recipe)
    assert pba.trial(RECIPES["digits"]()) == replace(RECIPES["digits"](), method="pba")


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "metaaugment.lab.search.ray_crew", raising=False)
    with pytest.raises(ValueError, match=r"^--ray-workers needs the package ray; install it with: pip install"):
        begin(tmp_path / "search", small(), replace(SETTINGS, ray_workers=2))


# -- with Ray --------------------------------------------------------------------------------------------------------

ray_warnings = pytest.mark.filterwarnings("ignore")  # Ray's own, of its dependencies and its processes
BY_RAY = replace(SETTINGS, ray_workers=2)


@ray_warnings
@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "--address is 127.0.0.1:1, where no Ray cluster answers .Connection refused.; start one"),
        ("ray://127.0.0.1:10001", "--address is ray://127.0.0.1:10001, which is for Ray's client; run the search on a"),
        ("cluster", "--address is 'cluster'; it must be HOST:PORT"),
        ("127.0.0.1:99999", "--address is '127.0.0.1:99999'; it must be HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}"):
        begin(tmp_path / "search", small(), replace(SETTINGS, address=address))


@ray_warnings
@pytest.mark.parametrize(("says", "why"), [(b"", "timed out"), (b"HTTP/1.0 400 Bad Request\r\n\r\n", "something else")])
def test_another_server_at_the_address(says: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes."""
    from metaaugment.lab.search import ray_crew

    monkeypatch.setattr(ray_crew, "ANSWERS_WITHIN", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def answer() -> None:
            accepted.append(server.accept()[0])
            accepted[0].sendall(says)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match=f"where no Ray cluster answers .{why}"):
            ray_crew._check_address(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
        accepted[0].close()


@pytest.fixture(scope="module")
def ray_session() -> Iterator[str]:
    """A local Ray with two workers; yields its address."""
    import ray

    from metaaugment.lab.search.ray_crew import connected

    for module in (sys.modules[__name__], processes):  # tests have work of their own, which workers cannot import
        ray.cloudpickle.register_pickle_by_value(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # or they wait for as long as other tests have work
        with connected(2, None):
            yield ray.get_runtime_context().gcs_address


class Struck(Workbench):
    """Its process dies once, in the second generation, as if the machine had run out of memory."""

    def __call__(self, interval: Interval) -> tuple[float, float]:
        struck = self.lab.folder / "struck"
        if interval.epochs.start == 1 and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Workbench.__call__(self, interval)


class Endless(Workbench):
    """Does not come to the end of the second generation until the search is resumed."""

    def __call__(self, interval: Interval) -> tuple[float, float]:
        if interval.epochs.start == 1:
            (self.lab.folder / "endless").touch()
            until((self.lab.folder / "resumed").exists)
        return Workbench.__call__(self, interval)


class Faulty(Workbench):
    def __call__(self, interval: Interval) -> NoReturn:
        raise RuntimeError("it is broken")


@pytest.mark.slow
@ray_warnings
def test_ray_finds_the_same_though_a_worker_is_killed(
    ray_session: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metaaugment.lab.search import ray_crew

    ray_crew._check_address(ray_session)  # a real one is not refused
    monkeypatch.setattr(pba, "Workbench", Struck)
    file = begin(tmp_path / "search", small(), BY_RAY)
    assert (tmp_path / "search" / "struck").exists()
    assert published.find(file) == published.find(whole / "policy.json")
    assert in_order(tmp_path / "search") == in_order(whole)


@pytest.mark.slow
@ray_warnings
def test_ray_stops_at_a_signal_and_processes_go_on(
    ray_session: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the intervals under way, which would go on for ten minutes."""
    out = tmp_path / "search"

    def ask() -> None:
        until((out / "endless").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask)
    asker.start()
    with monkeypatch.context() as patch:
        patch.setattr(pba, "Workbench", Endless)
        with pytest.raises(Interrupted):
            begin(out, small(), BY_RAY)
    asker.join()
    assert len(rows(out)) == 4
    assert published.find(resume(out, small())) == published.find(whole / "policy.json")
    assert in_order(out) == in_order(whole)


@pytest.mark.slow
@ray_warnings
@pytest.mark.parametrize(
    ("owner", "name", "other", "sentence"),
    [
        (metaaugment, "__version__", "0.0", "Ray cluster has metaaugment .*, but this one has 0.0; install"),
        (pba, "Workbench", Faulty, "of Ray failed with: it is broken; .*, continue with --resume '/.*/of mine'$"),
    ],
)
def test_what_is_wrong_in_a_worker_is_a_sentence(
    owner: Any, name: str, other: Any, sentence: str, ray_session: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    with pytest.raises(ValueError, match=sentence):
        begin(tmp_path / "of mine", small(), BY_RAY)
