"""The paper's tables: which runs make up each row, and the figures that the paper has for them.

What the paper calls AA, RA and so on has our method's name; entries that it does not have are ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from metaaugment.baselines import published
from metaaugment.experiments import methods
from metaaugment.experiments.paper import RECIPES
from metaaugment.experiments.recipe import Recipe

# Joint training that is nearly free: w one policy step behind, the policy updated on each eighth step at eight times
# the rate.
FAST: dict[str, Any] = {"lagged": True, "every": 8, "policy_lr": 8e-3}


@dataclass(frozen=True)
class Entry:
    """Runs that differ in their seed only. `under` names the entry whose learned policy they are trained under."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""
    under: tuple[str, str] | None = None  # a row, and its entry


@dataclass(frozen=True)
class Row:
    """One network on one data set."""

    recipe: str
    table: str
    entries: tuple[Entry, ...]

    def run(self, entry: Entry, seed: int, epochs: int | None, policy: Path | None) -> Recipe:
        recipe = replace(RECIPES[self.recipe](), seed=seed, policy=policy, **entry.changes)
        return recipe if epochs is None else replace(recipe, epochs=epochs)


METHODS = ("baseline", "autoaugment", "faa", "pba", "dada", "randaugment", "trivialaugment", "advaa", "metaaugment")


def _row(recipe: str, table: str, *more: Entry, **paper: str) -> Row:
    """A row of a table with the paper's figures by method, and further entries.

    Where a system has published nothing for the data, the entry says whose policy it is, and has no figure of the
    paper's, which searched for one.
    """
    entries = tuple(_entry(recipe, method, paper.get(method, "")) for method in METHODS)
    return Row(recipe, table, (*entries, *more))


def _entry(recipe: str, method: str, figure: str) -> Entry:
    data = RECIPES[recipe]().dataset
    if methods.METHODS[method].found and data in ("digits", "omniglot"):
        policy = published.fitting(method, data)
        return Entry(policy, {"method": method})
    return Entry(method, {"method": method}, figure)


def _fast() -> Entry:
    return Entry("metaaugment-fast", {"method": "metaaugment", **FAST})


def _mt(figure: str = "") -> Entry:
    return Entry("metaaugment-mt-fast", {"method": "metaaugment", "copies": 4, **FAST}, figure)


def _under(row: str, entry: str = "metaaugment-fast", figure: str = "") -> Entry:
    """Transfer: under the policy of the first seed of another row's, or of this one's, joint training."""
    network = row.split("-", 1)[1]
    return Entry(f"transfer-{network}", {"method": "metaaugment"}, figure, (row, entry))


ROWS: dict[str, Row] = {
    row.recipe: row
    for row in (
        _row("digits", "digits"),
        _row(
            "omniglot-wrn-40-2", "table-3", _fast(), _mt(), _under("omniglot-wrn-40-2"), _under("omniglot-wrn-28-10"),
            baseline="85.86", randaugment="88.10", metaaugment="89.12 ± 0.10",
        ),
        _row(
            "omniglot-wrn-28-10", "table-3", _fast(), _under("omniglot-wrn-40-2"),
            baseline="87.89", randaugment="87.86", metaaugment="89.61 ± 0.05",
        ),
        _row(
            "cifar10-wrn-40-2", "table-1", _fast(), _under("cifar10-wrn-28-10", figure="96.82 ± 0.10"),
            baseline="94.7", autoaugment="96.3", faa="96.4", dada="96.4", metaaugment="96.79 ± 0.06",
        ),
        _row(
            "cifar10-wrn-28-10", "table-1", _fast(), _mt("98.26 ± 0.02"),
            baseline="96.1", autoaugment="97.4", faa="97.3", pba="97.42", dada="97.3", randaugment="97.3",
            advaa="98.10", metaaugment="97.76 ± 0.04",
        ),
        _row(
            "cifar100-wrn-40-2", "table-1", _fast(), _under("cifar100-wrn-28-10", figure="80.15 ± 0.09"),
            baseline="74.0", autoaugment="79.3", faa="79.4", dada="79.1", metaaugment="80.60 ± 0.16",
        ),
        _row(
            "cifar100-wrn-28-10", "table-1", _fast(), _mt("85.21 ± 0.09"),
            baseline="81.2", autoaugment="82.9", faa="82.8", pba="83.27", dada="82.5", randaugment="83.3",
            advaa="84.51", metaaugment="83.79 ± 0.11",
        ),
        _row(
            "imagenet-resnet-50", "table-4",
            baseline="76.3", autoaugment="77.6", faa="77.6", dada="77.5", randaugment="77.6", advaa="79.40",
            metaaugment="79.74 ± 0.08",
        ),
    )
}  # fmt: skip
TABLES = tuple(dict.fromkeys(row.table for row in ROWS.values()))


def find_rows(names: tuple[str, ...]) -> list[Row]:
    """The rows of tables and rows by their names."""
    rows: dict[str, Row] = {}
    for name in names:
        found = [row for row in ROWS.values() if name in (row.recipe, row.table)]
        if not found:
            raise ValueError(f"unknown table or row {name!r}; choose of {', '.join((*TABLES, *ROWS))}")
        rows |= {row.recipe: row for row in found}
    return list(rows.values())
