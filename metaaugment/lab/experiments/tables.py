"""The paper's tables: which runs make up each row, and the figures that the paper has for them.

What the paper calls AA, RA and so on goes by our method's name; entries that the paper does not have are ours. Except
on Omniglot, the paper's figures for compared systems are those that their authors published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from metaaugment.lab.baselines import published
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.paper import FAST, RECIPES
from metaaugment.lab.experiments.recipe import Recipe


@dataclass(frozen=True)
class Entry:
    """Runs that differ in their seed only.

    `under` names the entry whose learned policy they are trained under. If `search` is given, which holds what the
    search sets otherwise than by default, their method's policy is searched for first.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""
    under: tuple[str, str] | None = None  # a row, and its entry
    search: Mapping[str, Any] | None = None
    apart: bool = False  # appears in comparisons only

    @property
    def stands_in(self) -> bool:
        """Whether its policy was published for other data; the paper has no such entry."""
        return self.name in published.PUBLISHED


@dataclass(frozen=True)
class Row:
    """One network on one data set."""

    recipe: str
    table: str
    entries: tuple[Entry, ...]

    def run(self, entry: Entry, seed: int, epochs: int | None, policy: Path | None) -> Recipe:
        recipe = replace(RECIPES[self.recipe](), seed=seed, policy=policy, **entry.changes)
        return recipe if epochs is None else replace(recipe, epochs=epochs)


def folder_name(recipe: str, epochs: int | None) -> str:
    """The folder of a row, with the epochs if they are not the recipe's: such figures must not mix with the paper's."""
    return recipe if epochs in (None, RECIPES[recipe]().epochs) else f"{recipe}-{epochs}-epochs"


def _row(recipe: str, table: str, *more: Entry, **paper: str) -> Row:
    """A row of a table with the paper's figures by method, and further entries.

    If a system has published no policy for the data, its entry is named after the policy used instead, and has no
    figure of the paper's, which searched for one.
    """
    entries = tuple(_entry(recipe, method, paper.get(method, "")) for method in METHODS)
    return Row(recipe, table, (*entries, *more))


def _transfer_row(recipe: str, table: str, source: str, metaaugment: str, **paper: str) -> Row:
    """A row whose network the paper trains under a policy learned with another one, instead of jointly."""
    row = _row(recipe, table, _under(source, metaaugment), **paper)
    return replace(row, entries=tuple(entry for entry in row.entries if entry.name != "metaaugment"))


def _entry(recipe: str, method: str, figure: str) -> Entry:
    made, needed = RECIPES[recipe](), METHODS[method].copies
    # Where all methods have copies, one that needs more has these.
    changes = {"method": method} | ({"copies": needed} if 1 < made.copies < needed else {})
    if METHODS[method].found:
        policy = published.fitting(method, made.dataset)
        if not made.dataset.startswith(policy.removeprefix(f"{method}-")):  # CIFAR-100 counts as CIFAR-10 here
            return Entry(policy, changes)
    return Entry(method, changes, figure)


def _searched(method: str, figure: str = "") -> Entry:
    """A compared system on data that it has published no policy for, with one that it finds there, as in the paper."""
    return Entry(method, {"method": method}, figure, search={})


def _fast() -> Entry:
    return Entry("metaaugment-fast", {"method": "metaaugment", **FAST})


def _changed(name: str, **changes: Any) -> Entry:
    """The fast joint training with some settings changed."""
    return Entry(name, {"method": "metaaugment", **FAST, **changes}, apart=True)


def _mt() -> Entry:
    return Entry("metaaugment-mt-fast", {"method": "metaaugment", "copies": 4, **FAST})


def _under(row: str, figure: str = "") -> Entry:
    """Transfer: under the policy that the first seed of joint training learned, in another row or in this one.

    Beside a figure of the paper's, that training is the paper's, too; otherwise the fast one."""
    network, source = row.split("-", 1)[1], "metaaugment" if figure else "metaaugment-fast"
    return Entry(f"transfer-{network}", {"method": "metaaugment"}, figure, (row, source))


# The paper's ablations, and two of ours, on the fast joint training. The policy's rate grows with the steps between its
# updates.
CHANGED = (
    *(_changed(f"fast-epsilon-{epsilon:g}", epsilon=epsilon) for epsilon in (0.0, 0.5, 1.0)),
    _changed("fast-no-embedding", policy_network="feature-policy"),
    _changed("fast-own-extractor", extractor="own"),
    _changed("fast-rejecting", policy_network="rejecting-policy-network"),
    _changed("fast-fixed-alpha", learn_alpha=False),
    *(_changed(f"fast-every-{every}", every=every, policy_lr=1e-3 * every) for every in (1, 4, 16)),
)

# The one candidate for a better learner that rehearsals selected (results/archive): under a constant rate the weights
# keep growing sharper at the end.
CHOSEN = _changed("fast-cosine", policy_schedule="cosine")

ROWS: dict[str, Row] = {
    row.recipe: row
    for row in (
        _row("digits", "digits"),
        _row(
            "omniglot-wrn-40-2", "table-3", _fast(), _mt(), _under("omniglot-wrn-40-2"), _under("omniglot-wrn-28-10"),
            _searched("faa", "88.72"), _searched("pba", "88.30"), _searched("dada"),
            *CHANGED, CHOSEN,
            baseline="85.86", randaugment="88.10", metaaugment="89.12 ± 0.10",
        ),
        _row(
            "omniglot-wrn-28-10", "table-3", _fast(), _under("omniglot-wrn-40-2"),
            _searched("faa", "89.24"), _searched("pba", "89.25"),
            baseline="87.89", randaugment="87.86", metaaugment="89.61 ± 0.05",
        ),
        _row(
            "cifar10-wrn-40-2", "table-1", _fast(), _under("cifar10-wrn-28-10", figure="96.82 ± 0.10"),
            baseline="94.7", autoaugment="96.3", faa="96.4", dada="96.4", metaaugment="96.79 ± 0.06",
        ),
        _row(
            "cifar10-wrn-28-10", "table-1", _fast(), _mt(),
            baseline="96.1", autoaugment="97.4", faa="97.3", pba="97.42", dada="97.3", randaugment="97.3",
            advaa="98.10", metaaugment="97.76 ± 0.04",
        ),
        _row(
            "cifar100-wrn-40-2", "table-1", _fast(), _under("cifar100-wrn-28-10", figure="80.15 ± 0.09"),
            CHOSEN,
            baseline="74.0", autoaugment="79.3", faa="79.4", dada="79.1", metaaugment="80.60 ± 0.16",
        ),
        _row(
            "cifar100-wrn-28-10", "table-1", _fast(), _mt(),
            baseline="81.2", autoaugment="82.9", faa="82.8", pba="83.27", dada="82.5", randaugment="83.3",
            advaa="84.51", metaaugment="83.79 ± 0.11",
        ),
        _transfer_row(
            "cifar10-shake-shake-26-2x96d", "table-1", "cifar10-wrn-28-10", "98.29 ± 0.03",
            baseline="97.1", autoaugment="98.0", faa="98.0", pba="97.97", dada="98.0", randaugment="98.0",
            advaa="98.15",
        ),
        _transfer_row(
            "cifar10-shake-shake-26-2x112d", "table-1", "cifar10-wrn-28-10", "98.28 ± 0.01",
            baseline="97.2", autoaugment="98.1", faa="98.1", pba="97.97", dada="98.0", advaa="98.22",
        ),
        _transfer_row(
            "cifar10-pyramidnet", "table-1", "cifar10-wrn-28-10", "98.57 ± 0.02",
            baseline="97.3", autoaugment="98.5", faa="98.3", pba="98.54", dada="98.3", randaugment="98.5",
            advaa="98.64",
        ),
        _transfer_row(
            "cifar100-shake-shake-26-2x96d", "table-1", "cifar100-wrn-28-10", "85.97 ± 0.09",
            baseline="82.9", autoaugment="85.7", faa="85.4", pba="84.69", dada="84.7", advaa="85.90",
        ),
        _transfer_row(
            "cifar100-pyramidnet", "table-1", "cifar100-wrn-28-10", "89.46 ± 0.11",
            baseline="86.0", autoaugment="89.3", faa="88.3", pba="89.06", dada="88.8", advaa="89.58",
        ),
        _row("cifar10-wrn-28-10-mt", "table-2", advaa="98.10", metaaugment="98.26 ± 0.02"),
        _row("cifar100-wrn-28-10-mt", "table-2", advaa="84.51", metaaugment="85.21 ± 0.09"),
        _row(
            "imagenet-resnet-50", "table-4",
            baseline="76.3", autoaugment="77.6", faa="77.6", dada="77.5", randaugment="77.6", advaa="79.40",
            metaaugment="79.74 ± 0.08",
        ),
        _transfer_row(
            "imagenet-resnet-200", "table-4", "imagenet-resnet-50", "81.43 ± 0.08",
            baseline="78.5", autoaugment="80.0", faa="80.6", advaa="81.32",
        ),
    )
}  # fmt: skip
TABLES = tuple(dict.fromkeys(row.table for row in ROWS.values()))


@dataclass(frozen=True)
class Comparison:
    """Entries of a row shown side by side, such as those of an ablation, which differ in one thing."""

    what: str
    row: str
    entries: tuple[str, ...]


COMPARISONS: dict[str, Comparison] = {
    f"ablation-{name}": Comparison(what, "omniglot-wrn-40-2", entries)
    for name, what, entries in (
        ("epsilon", "how much of the distribution over transformations is uniform: 0, 0.1, 0.5, 1",
         ("fast-epsilon-0", "metaaugment-fast", "fast-epsilon-0.5", "fast-epsilon-1")),
        ("embedding", "whether the policy sees the transformation", ("metaaugment-fast", "fast-no-embedding")),
        ("extractor", "whether the policy's features come from the task network or from a network of its own",
         ("metaaugment-fast", "fast-own-extractor")),
        ("rejection", "whether samples below the mean weight are left out", ("metaaugment-fast", "fast-rejecting")),
        ("alpha", "whether the inner step size is learned", ("metaaugment-fast", "fast-fixed-alpha")),
        ("every", "steps from one policy update to the next: 1, 4, 8, 16",
         ("fast-every-1", "fast-every-4", "metaaugment-fast", "fast-every-16")),
        ("copies", "transformations of each image: 1, 4", ("metaaugment-fast", "metaaugment-mt-fast")),
    )
} | {
    f"learners-{row}": Comparison(
        "equal weights, the paper's learner, and the one of ours that the rehearsals selected",
        row, ("randaugment", "metaaugment-fast", CHOSEN.name),
    )
    for row in ("omniglot-wrn-40-2", "cifar100-wrn-40-2")
}  # fmt: skip


def find_rows(names: tuple[str, ...]) -> list[Row]:
    """The rows of the named tables, rows and comparisons, each entry once; `apart` entries for comparisons only."""
    rows: dict[str, Row] = {}
    for name in names:
        if name in COMPARISONS:
            row, entries = ROWS[COMPARISONS[name].row], COMPARISONS[name].entries
            found = [replace(row, entries=tuple(entry for entry in row.entries if entry.name in entries))]
        else:
            found = [
                replace(row, entries=tuple(entry for entry in row.entries if not entry.apart))
                for row in ROWS.values() if name in (row.recipe, row.table)
            ]  # fmt: skip
        if not found:
            base = name.removesuffix("-fast")
            if base != name and base in ROWS:
                raise ValueError(f"{name!r} is a recipe, not a row; it is run by: {base} --methods metaaugment-fast")
            choice = ", ".join(dict.fromkeys((*TABLES, *ROWS, *COMPARISONS)))
            raise ValueError(f"unknown table, row or comparison {name!r}; choose from {choice}")
        for row in found:
            before = rows[row.recipe].entries if row.recipe in rows else ()
            once = {entry.name: entry for entry in (*before, *row.entries)}
            rows[row.recipe] = replace(row, entries=tuple(once.values()))
    return list(rows.values())
