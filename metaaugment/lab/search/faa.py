"""Fast AutoAugment's search: density matching by Bayesian optimization (Lim et al., NeurIPS 2019).

Each of K folds splits the training images, class by class, into D_M and D_A. A network θ is trained on D_M without
augmentation; then TPE looks for policies T that keep D_A where θ expects it: those that minimize L(θ | T(D_A)), the
mean cross-entropy over held-out images under transformations of T. Trials train no network. The policy found joins the
sub-policies of the best policies of all folds.

As in the released code, TPE works as in HyperOpt (20 random trials first, each number modelled on its own), and of
sub-policies with the same functions in one policy the first is kept. The functions are the 14 of MetaAugment, as in its
Omniglot experiment; levels are Fast AutoAugment's own, in [0, 1]. docs/decisions.md says why the smallest loss of five
draws counts, and which images the search sees.

The recipe's flip, crop and Cutout are not part of T, and D_A is judged without them: θ has been trained with flip and
crop, so they would only add noise to all policies alike, and Cutout comes after the policy when a network is trained
under it. A policy that does nothing therefore scores what the plain images score.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from metaaugment.files.lock import FileLock
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import FoundPolicy, Function, SubPolicies
from metaaugment.lab.data.batches import Reader, on_device
from metaaugment.lab.experiments.flags import refuse
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search.crew import Crew
from metaaugment.lab.search.fold import Fold, divide
from metaaugment.lab.search.studies import STUDIES, claim, finished, give_up, open_studies, running, value
from metaaugment.lab.search.trials import Laboratory, Tenths, another_tenth, understood
from metaaugment.lab.seeds import FOLD, PROPOSAL, TRIAL, derived_seed
from metaaugment.lab.training.folder import SEARCH, TRIALS
from metaaugment.lab.training.json_file import read_json
from metaaugment.lab.training.log import Row
from metaaugment.lab.words import number_of
from metaaugment.ops import INDEX, OPS, PAPER_OPS

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import BaseTrial, FrozenTrial

# The first trials of a study; HyperOpt's number.
RANDOM_TRIALS = 20
# The objective of a policy under which the loss is not finite.
WORST = -1e9
ROW = {"fold": int, "number": int, "objective": float}  # what all rows have


@dataclass(frozen=True)
class Settings:
    """Fast AutoAugment: score policies by how well networks trained without them recognise augmented images."""

    folds: int = 5
    """Splits of the training images, each with its own network and its own Optuna study."""
    held_out: float = 0.4
    """Share of the training images on which a fold evaluates policies; its network is trained on the others."""
    trials: int = 200
    """Policies tried in each fold."""
    sub_policies: int = 5
    """Sub-policies per policy, each of two functions."""
    draws: int = 5
    """Augmented copies per held-out image, of which the best counts: 5 in the released code, 1 in the paper."""
    best: int = 10
    """Policies per fold whose sub-policies make up the final policy."""
    processes: int = 1
    """Processes that share the trials, spread over the GPUs; only a search with one process is reproducible."""
    storage: str | None = None
    """SQLAlchemy URL of a database through which several machines share the trials; by default a local file."""

    def check(self) -> None:
        for name in ("folds", "trials", "sub_policies", "draws", "best", "processes"):
            refuse(name, getattr(self, name), getattr(self, name) >= 1, "a whole number of at least 1")
        refuse("held_out", self.held_out, 0 < self.held_out <= 0.5, "a share above 0, and at most 0.5")
        refuse("storage", self.storage, self.storage is None or "://" in self.storage, "a URL such as sqlite:///FILE")


def trial(recipe: Recipe) -> Recipe:
    """The recipe of the folds' networks: the given one, with at most 200 epochs as in the released code."""
    return replace(recipe, epochs=min(recipe.epochs, 200), copies=1)


def work(rows: Sequence[Row]) -> str:
    """What the rows are, in words: trainings of the folds' networks, and policies that were tried on them."""
    trained = len(rows) - len(_tried(rows))
    return f"{number_of('trial', len(rows) - trained)} and {number_of('training', trained)} of a network"


def find(lab: Laboratory, settings: Settings) -> FoundPolicy:
    """Search until each fold has its trials; one process and one seed find the same policy, interrupted or not."""
    _check(lab, settings)
    key, progress = _key(lab, settings), _Progress(lab, settings)
    folds = _Folds(lab, settings, key, progress.look)
    studies = folds.studies
    if settings.storage is None:
        with understood(lab.folder / STUDIES):
            # A trial is noted once it is in its study.
            for fold, number in sorted(_noted(lab) - _rows_of(settings, studies).keys()):
                if number > 0:
                    raise ValueError(f"it has no trial {number} of fold {fold}, which {TRIALS} has")
    progress.introduce(studies)
    while True:
        if settings.storage is None:
            give_up([(study, trial) for study in studies for trial in running(study)])
        # Finished trials of other machines, and of processes that were killed before they could note them.
        noted = _noted(lab)
        for place, row in _rows_of(settings, studies).items():
            if place not in noted:
                lab.note(row)
        missing = sum(settings.trials - len(finished(study)) for study in studies)
        if missing == 0:
            return _found(lab, settings, studies)
        number = min(settings.processes, missing)
        if number == 1:
            folds(0)
        else:
            with Crew(lab, number, _Folds, (settings, key)) as crew:
                for _ in crew.do(range(number), progress.look):
                    pass
            progress.look()  # at what the last of them noted on its way out
        if settings.storage is not None:
            _await_others(lab, studies)


def _check(lab: Laboratory, settings: Settings) -> None:
    """Refuse, before anything is begun, what cannot be trained or continued."""
    trained, _ = divide(lab.data.train.labels, settings.held_out, 0)
    if len(trained) < lab.recipe.batch:
        raise ValueError(
            f"--batch is {lab.recipe.batch}, but a fold trains on {len(trained)} images only; choose at most that many"
        )
    in_folder = (lab.folder / STUDIES).exists()
    if lab.trials() and in_folder and settings.storage is not None:
        raise ValueError(f"{lab.folder} has its trials in its own {STUDIES}; leave out --storage")
    if lab.trials() and not in_folder and settings.storage is None:
        raise ValueError(
            f"{lab.folder} has trials but no {STUDIES}; if they are in a database, name it with --storage URL, "
            "otherwise restore the file, or begin another search with --out"
        )


def _found(lab: Laboratory, settings: Settings, studies: "Sequence[Study]") -> SubPolicies:
    """The sub-policies of the best policies of each fold, without duplicates."""
    kept: list[tuple[Function, Function]] = []
    for study in studies:
        ranked = sorted(finished(study).values(), key=lambda trial: -value(trial))
        for trial in ranked[: settings.best]:
            first: dict[tuple[str, str], tuple[Function, Function]] = {}
            for pair in propose(trial, settings.sub_policies).sub_policies:
                first.setdefault((pair[0].name, pair[1].name), pair)
            kept += first.values()
    return replace(
        _policy(dict.fromkeys(kept)),
        source=f"Fast AutoAugment's search for {lab.recipe.name}: {settings.folds} folds of {settings.trials} trials, "
        f"seed {lab.recipe.seed}",
    )


# -- folds ------------------------------------------------------------------------------------------------------------


def train(lab: Laboratory, settings: Settings, number: int) -> Fold:
    """θ of a fold, trained on D_M without augmentation, or loaded if it is trained already.

    Its row, number 0 of the fold, has the cost of the training and the objective without a policy.
    """
    seed = derived_seed(lab.recipe.seed, FOLD, number)
    trained, judged = divide(lab.data.train.labels, settings.held_out, seed)
    data = replace(lab.data, train=lab.data.train.take(trained), val=lab.data.train.take(judged))
    # A second process waits here, and then loads what the first one trained.
    with FileLock(lab.folder / f"fold-{number}.lock"):
        lab.stop_if_asked()
        experiment = lab.experiment(data, method="baseline", policy=None)
        trainer = lab.trainer(experiment, lab.folder / f"fold-{number}")
        said = "fold {}: {}; accuracy {:.2%} on held-out images"
        trainer.watchers = [Tenths(lab, lambda epoch, row: said.format(number, epoch, row["val_accuracy"]))]
        trainer.run()
        reader = Reader(lab.place.readers, lab.place.corrupt == "skip")
        held_out = on_device(data.val, lab.device)
        prepare = experiment.normalization()
        fold = Fold(number, experiment.network, data, held_out, lab.device, prepare, trainer.precision, reader)
        if (number, 0) not in _noted(lab):
            plain = fold.objective()
            if not math.isfinite(plain):
                raise ValueError(
                    f"the network of fold {number} diverged: its loss on held-out images is {-plain}; "
                    "search in another folder with a smaller --lr"
                )
            seconds = sum(row["seconds"] for row in trainer.log.rows)
            lab.note(_row(settings, number, 0, plain, seconds))
    return fold


# -- trials -----------------------------------------------------------------------------------------------------------


def search(
    lab: Laboratory, settings: Settings, fold: Fold, study: "Study", look: Callable[[], None] = lambda: None
) -> None:
    """Try policies until no trial of the fold is left to start."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    while True:
        lab.stop_if_asked()
        trial = claim(lab.folder, study, settings.trials)
        if trial is None:
            return
        began = time.perf_counter()
        place, seed = trial.user_attrs["place"], lab.recipe.seed
        # A new sampler for each trial: what it proposes depends only on the trial's place and on the trials before it.
        study.sampler = TPESampler(
            n_startup_trials=RANDOM_TRIALS,
            multivariate=False,
            seed=derived_seed(seed, PROPOSAL, fold.number, place) % 2**32,
        )
        policy = propose(trial, settings.sub_policies)
        objective = fold.objective(policy, derived_seed(seed, TRIAL, fold.number, place), settings.draws)
        trial.set_user_attr("seconds", time.perf_counter() - began)
        # Another machine may have given this trial up meanwhile; then it does not count.
        told = study.tell(trial, objective if math.isfinite(objective) else WORST, skip_if_finished=True)
        if told.state == TrialState.COMPLETE:
            lab.note(_row_of(settings, fold.number, told))
        look()


def propose(trial: "BaseTrial", sub_policies: int) -> SubPolicies:
    """The policy of a trial: drawn by the study's sampler, or read back if the trial is finished."""
    names = [op.name for op in PAPER_OPS]

    def function(place: str) -> Function:
        name = trial.suggest_categorical(f"function-{place}", names)
        probability = trial.suggest_float(f"probability-{place}", 0, 1)
        level = trial.suggest_float(f"level-{place}", 0, 1)
        return Function(name, probability, level if OPS[INDEX[name]].magnitude else 0.0)

    return _policy((function(f"{n}-first"), function(f"{n}-second")) for n in range(sub_policies))


def _policy(pairs: Iterable[tuple[Function, Function]]) -> SubPolicies:
    return SubPolicies(system="faa", source="", space="faa", max_level=1, sub_policies=tuple(pairs))


# -- rows -------------------------------------------------------------------------------------------------------------


def _row(settings: Settings, fold: int, number: int, objective: float, seconds: float) -> Row:
    place = fold * (settings.trials + 1) + number
    return {"trial": place, "fold": fold, "number": number, "objective": objective, "seconds": seconds}


def _row_of(settings: Settings, fold: int, trial: "FrozenTrial") -> Row:
    row = _row(settings, fold, trial.user_attrs["place"] + 1, value(trial), trial.user_attrs["seconds"])
    return row | {"sub_policies": published.encode(propose(trial, settings.sub_policies))["sub_policies"]}


def _rows_of(settings: Settings, studies: "Sequence[Study]") -> dict[tuple[int, int], Row]:
    """The rows of all finished trials, by fold and number."""
    rows = [_row_of(settings, fold, trial) for fold, study in enumerate(studies) for trial in finished(study).values()]
    return {(row["fold"], row["number"]): row for row in rows}


def _noted(lab: Laboratory) -> set[tuple[int, int]]:
    return {(row["fold"], row["number"]) for row in lab.trials()}


def _tried(rows: Sequence[Row]) -> list[Row]:
    """The rows of trials; the others are of networks."""
    return [row for row in rows if row["number"] > 0]


class _Progress:
    """Reports progress from the rows noted so far: each trained network, and each tenth of the trials."""

    def __init__(self, lab: Laboratory, settings: Settings) -> None:
        self.lab, self.settings, self.total = lab, settings, settings.folds * settings.trials
        self.seen = len(lab.trials())

    def introduce(self, studies: "Sequence[Study]") -> None:
        """Say which networks are still to be trained before their trials, if any."""
        noted, recipe = _noted(self.lab), self.lab.recipe
        unfinished = [fold for fold, study in enumerate(studies) if len(finished(study)) < self.settings.trials]
        missing = sum((fold, 0) not in noted for fold in unfinished)
        if missing > 0:
            trained, judged = divide(self.lab.data.train.labels, self.settings.held_out, 0)
            self.lab.say(
                f"{missing} of {self.settings.folds} folds to train: {recipe.network} for "
                f"{number_of('epoch', recipe.epochs)} on {len(trained):,} images each; then "
                f"{self.settings.trials:,} trials on the {len(judged):,} images held out of each"
            )

    def look(self) -> None:
        rows, before = self.lab.trials(), self.seen
        self.seen = len(rows)
        for row in rows[before:]:
            if row["number"] == 0:
                self.lab.say(f"fold {row['fold']}: trained; loss {-row['objective']:.4f} on plain held-out images")
        tried = _tried(rows)
        if another_tenth(len(_tried(rows[:before])), len(tried), self.total):
            folds = sorted({row["fold"] for row in tried})
            least = {fold: -max(row["objective"] for row in tried if row["fold"] == fold) for fold in folds}
            losses = "".join(f"; fold {fold}: least loss {loss:.4f} on augmented ones" for fold, loss in least.items())
            self.lab.say(f"{len(tried):,} of {self.total:,} trials{losses}")


# -- the work of a process, and of other machines ----------------------------------------------------------------------


def _key(lab: Laboratory, settings: Settings) -> str:
    """What tells searches in one database apart: everything that decides the outcome of a trial.

    The recipe is the one recorded when the search began: another version of the program may have other fields.
    """
    record = lab.folder / SEARCH
    recipe = read_json(record)["recipe"] if record.exists() else lab.recipe.to_json()
    decisive = asdict(replace(settings, processes=1, storage=None))
    text = json.dumps([recipe, decisive, lab.data.fingerprint()])
    return f"faa-{lab.recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class _Folds:
    """The folds of a search, each with its study. Called with the number of one, it begins there, and trains and
    searches all that are not finished; other processes may do the same at once."""

    def __init__(self, lab: Laboratory, settings: Settings, key: str, look: Callable[[], None] = lambda: None) -> None:
        self.lab, self.settings, self.look = lab, settings, look
        names = [f"{key}-fold-{fold}" for fold in range(settings.folds)]
        self.studies = open_studies(lab.folder, settings.storage, names)

    def __call__(self, first: int) -> None:
        for fold in (number % self.settings.folds for number in range(first, first + self.settings.folds)):
            study = self.studies[fold]
            if len(finished(study)) < self.settings.trials:
                trained = train(self.lab, self.settings, fold)
                self.look()
                search(self.lab, self.settings, trained, study, self.look)


def _await_others(lab: Laboratory, studies: "Sequence[Study]") -> None:
    """Wait until other machines have finished their trials, or have been silent for so long that they must be dead.

    Measured by our own clock: theirs may show another time.
    """
    changed, before = time.monotonic(), -1
    while still := [(study, trial) for study in studies for trial in running(study)]:
        lab.stop_if_asked()
        done = [trial for study in studies for trial in finished(study).values()]
        longest = max((trial.user_attrs["seconds"] for trial in done), default=0.0)
        if len(done) != before:
            before, changed = len(done), time.monotonic()
        if time.monotonic() - changed > max(60, 10 * longest):
            give_up(still)
            return
        time.sleep(1)
