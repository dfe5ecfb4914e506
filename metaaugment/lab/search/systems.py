"""The searches there are, by the name of their system."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from metaaugment.lab.baselines.found import FoundPolicy
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.search import auto_augment, dada, faa, pba
from metaaugment.lab.search.trials import Laboratory
from metaaugment.lab.training.log import Row
from metaaugment.lab.words import number_of


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
