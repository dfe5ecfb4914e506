"""The searches there are, and each from beginning to end: its folder, its cost, and the policy file it ends in."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import FoundPolicy
from metaaugment.lab.data import CorruptImage
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.experiment import data_of
from metaaugment.lab.experiments.flags import check_agreement, flags
from metaaugment.lab.experiments.messages import say_data
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place, check_threads
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import auto_augment, dada, faa, pba
from metaaugment.lab.search.trials import Laboratory, check_rows, understood
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.folder import POLICY, SEARCH, TRIALS
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.json_file import read_json, typed, write_json
from metaaugment.lab.training.launch import launch
from metaaugment.lab.training.log import Row
from metaaugment.lab.training.machine import commit, machine, threads
from metaaugment.lab.training.trainer import check_identity
from metaaugment.lab.words import duration, number_of


@dataclass(frozen=True)
class Kind:
    """The search of a compared system.

    `system` is its name. `settings` is a flat dataclass, whose method `check` refuses invalid values. `find` is the
    search itself; `trial` turns a recipe into the default recipe of a trial. `work` says what the rows of its folder
    are, `row` what each of them has. `where` names the settings that decide only where trials run. `spread` says how
    the work is spread if not by Ray.
    """

    system: str
    settings: type
    find: Callable[[Laboratory, Any], FoundPolicy]
    trial: Callable[[Recipe], Recipe] = lambda recipe: recipe
    work: Callable[[Sequence[Row]], str] = lambda rows: number_of("trial", len(rows))
    where: tuple[str, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    spread: str = ""

    def default(self, name: str) -> Recipe:
        """What the search trains by default, on the data of the recipe of this name and with its network."""
        return self.trial(replace(RECIPES[name](), method=self.system))


SEARCHES: dict[str, Kind] = {
    kind.system: kind
    for kind in (
        Kind(
            "faa", faa.Settings, faa.find, faa.trial, faa.work, ("processes", "storage"), faa.ROW,
            "shares its trials among processes with --processes N, and among machines with --storage URL",
        ),
        Kind("pba", pba.Settings, pba.find, pba.trial, pba.work, ("processes", "ray_workers", "address"), pba.ROW),
        Kind(
            "dada", dada.Settings, dada.find, dada.trial, dada.work, row=dada.ROW,
            spread="is a single training run, on one device",
        ),
        Kind(
            "autoaugment", auto_augment.Settings, auto_augment.find, auto_augment.trial, row=auto_augment.ROW,
            spread="trains its networks one after the other, on one device, as each depends on those before it",
        ),
    )
}  # fmt: skip


def search(
    kind: Kind, recipe: Recipe, settings: Any, place: Place, console: Console, said: Collection[str] = frozenset()
) -> Path:
    """Search to the end; returns the policy file. With `place.resume`, an interrupted search continues.

    `said`: as in `check_agreement`.
    """
    begun_with = None
    if place.resume is not None:
        recipe, settings, begun_with = _recorded(kind, recipe, settings, place, said)
        place = place.recalled(place.resume)
    validity.check(recipe)
    if recipe.policy is not None or place.tensorboard:
        flag = "--policy" if recipe.policy is not None else "--tensorboard"
        raise ValueError(f"{flag} is not used by a search; leave it out")
    if place.precision == "float64":
        raise ValueError("--precision is float64, which only train supports; leave it out, or choose float32")
    if recipe.method != kind.system:
        raise ValueError(f"--method is {recipe.method!r}; this is the search of {kind.system}; leave out the flag")
    settings.check()
    place.check()
    folder = place.folder(recipe, "searches")
    file = folder / POLICY
    about = recorded(kind, recipe, settings)
    data = data_of(recipe, place, console)
    if len(data.val) == 0:
        raise ValueError(f"{data.name} has no validation images, which a search judges by; hold some out")
    if data.dim is not None:
        say_data(data, console)
    if place.resume is None:
        run_folder.new(folder, "search")
    number = place.computing(begun_with)
    with run_folder.locked(folder, launch()), Interruption() as interruption, threads(number):
        if file.exists():
            console.print(f"{folder} is finished already; {file}", soft_wrap=True)
            return file
        record = about | {"data": data.fingerprint(), "threads": number}
        if place.resume is not None:
            _check_same(folder / SEARCH, record)
        place.remember(folder, recipe.dataset)
        if place.resume is None:
            write_json(folder / SEARCH, record)
        lab = Laboratory(recipe, place, data, folder, console, interruption)
        if place.resume is not None:
            with understood(folder / TRIALS):
                check_rows(lab.trials(), kind.row)
        try:
            policy = kind.find(lab, settings)
            cost = cost_of(lab)
            published.write(policy, file, search=record | {"cost": cost, "commit": commit()})
        except Interrupted:
            command = _command(kind, lab, settings)
            lab.say(f"stopped after {kind.work(lab.trials())}; nothing is lost, continue with: {command}")
            raise
        except CorruptImage as error:
            # Not to be removed: the data would no longer be those that the search began with.
            command = _command(kind, replace(lab, place=replace(place, corrupt="skip")), settings)
            raise ValueError(f"{error}; leave it out and continue with: {command}") from None
        except ValueError:
            # If the search never began, its folder is freed: once the mistake is fixed, it can be named again.
            run_folder.give_up(folder, SEARCH)
            raise
        except OSError as error:
            if error.errno is None:
                raise
            way = f"{error.strerror}; once that is fixed, continue with: {_command(kind, lab, settings)}"
            raise OSError(error.errno, way, error.filename or str(folder)) from None
    work = kind.work(lab.trials())
    lab.say(f"{work}, {cost['seconds']:,.0f} {cost['unit']} ({duration(cost['seconds'])}); {file}")
    return file


def recorded(kind: Kind, recipe: Recipe, settings: Any) -> dict[str, Any]:
    """What a search records of how it searches."""
    decisive = {name: value for name, value in asdict(settings).items() if name not in kind.where}
    return {"recipe": recipe.to_json(), "settings": decisive}


def record_of(system: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a search on a recipe records when it begins, if these fields of the trial and the settings are changed."""
    kind = SEARCHES[system]
    own = {field.name for field in fields(kind.settings)}  # no recipe has a field of this name
    trial = replace(kind.default(name), **{field: value for field, value in changes.items() if field not in own})
    settings = kind.settings(**{field: value for field, value in changes.items() if field in own})
    return recorded(kind, trial, settings)


def cost_of(lab: Laboratory) -> dict[str, Any]:
    trials = lab.trials()
    return {
        "trials": len(trials),
        "seconds": sum(trial["seconds"] for trial in trials),
        "unit": "GPU-seconds" if lab.device.type == "cuda" else "CPU-seconds",
        "machine": machine(lab.device.type),
    }


def _recorded(
    kind: Kind, recipe: Recipe, settings: Any, place: Place, said: Collection[str]
) -> tuple[Recipe, Any, int | None]:
    """What a search to be resumed was begun with: recipe, settings, and threads, which older records do not say.

    Flags that were given must agree with it, but for the threads.
    """
    folder = place.resumed("search", SEARCH)
    with understood(folder / SEARCH):
        values = read_json(folder / SEARCH)
        found = Recipe.from_json(values["recipe"])
    # Before its settings are read: those of another system would be taken for damaged ones.
    if (found.name, found.method) != (recipe.name, kind.system):
        raise ValueError(
            f"{folder} is a search of {found.method} for {found.name}, not of {kind.system} for {recipe.name}; "
            f"continue it as {found.method} {found.name}"
        )
    with understood(folder / SEARCH):
        set_then = _settings(kind.settings, values["settings"])
        begun_with = values.get("threads")
        check_threads(begun_with)
    check_agreement(folder, recipe, kind.default(recipe.name), found, said)
    free = {name: getattr(settings, name) for name in kind.where}
    set_then = replace(set_then, **free)
    check_agreement(folder, settings, kind.settings(), set_then, said)
    return found, set_then, begun_with


def _settings(settings: type, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(settings)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"unknown search field {unknown[0]!r}, as of another version; the fields are {', '.join(sorted(known))}"
        )
    try:
        return typed(settings, values)
    except ValueError as error:
        raise ValueError(f"the search {error}") from None


def _check_same(file: Path, record: Mapping[str, Any]) -> None:
    """Refuse to continue a search with other settings or data; only settings that both versions know are compared."""
    begun = read_json(file)
    for part in ("recipe", "settings"):
        check_identity(file, begun[part], record[part])
    check_identity(file, {"data": begun.get("data")}, {"data": record["data"]})


def _command(kind: Kind, lab: Laboratory, settings: Any) -> str:
    """The command that continues the search."""
    where = flags(settings, type(settings)(), kind.where)
    words = ["metaaugment", "search", lab.recipe.method, lab.recipe.name, *lab.place.flags()]
    return shlex.join([*words, "--resume", str(lab.folder), *where])
