"""The report of runs as one page that needs nothing else: no server, no network, no third-party script."""

import base64
import contextlib
import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor

import metaaugment
from metaaugment.files.atomic import write_atomically
from metaaugment.lab.report import curves, diagnosis, learned, preferences, runs
from metaaugment.lab.report.comparison import Group, alike, groups, repeated, table, unlike
from metaaugment.lab.report.concerns import concerns
from metaaugment.lab.report.picture import ABOVE, BELOW, COLORS, Picture, tint
from metaaugment.lab.report.preferences import by_function, extremes, single
from metaaugment.lab.report.runs import Run, run_folders
from metaaugment.lab.report.seen import Card, Seen
from metaaugment.lab.training.checkpoint import LOOK
from metaaugment.lab.training.folder import DIAGNOSIS, RECIPE, RESULT
from metaaugment.lab.training.interruption import Interrupted, Interruption
from metaaugment.lab.training.log import LOG
from metaaugment.lab.words import printable

GENERATOR = "metaaugment report"
PRECISION = 1000  # p is written in this many parts of the uniform probability
LOOK_EVERY = 0.5  # seconds between looks at runs that are followed
REFRESH = 5  # seconds after which a page that follows runs reloads itself
SMALL = 64  # pixels of a side up to which an image stays lossless; larger photographs are compressed


@dataclass(frozen=True, eq=False)
class Policy:
    """What a group has learned, shown by the first of its runs that has something to show."""

    group: Group
    run: Run

    @property
    def seen(self) -> Seen | None:
        return self.run.seen

    @cached_property
    def map(self) -> dict[str, Any] | None:
        """p_{j,k} of all epochs in thousandths of uniform, for the slider, and the cells of the last one."""
        epochs, p = self.run.distributions
        if not len(epochs) or single(p[-1]):
            return None
        relative = p / p.sum((1, 2), keepdims=True) * p[0].size
        # Over the later half: a few pairs that are far off in the first epochs would leave all else pale.
        reach = max(0.05, float(np.abs(relative[len(p) // 2 :] - 1).max()))
        return {
            "epochs": epochs.tolist(),
            "relative": (relative * PRECISION).round().astype(int).reshape(len(p), -1).tolist(),
            "reach": reach,
            "rows": _cells(relative[-1], reach),
            "words": f"After epoch {epochs[-1]}, as multiples of uniform: {extremes(p[-1], 1)}.",
        }

    @cached_property
    def pictures(self) -> list[Picture]:
        """How weights spread by epoch, and how often functions are drawn."""
        found = [curves.weight_spread(self.run)] if len(self.run.quantiles[0]) else []
        epochs, p = self.run.distributions
        return found + ([learned.marginals(p[-1], int(epochs[-1]))] if len(epochs) else [])

    @cached_property
    def samples(self) -> dict[str, list[Card]]:
        """The samples to show, of each kind."""
        return {} if self.seen is None else learned.cards(self.seen, self.run.count("size"))

    def files(self) -> Iterator[Picture]:
        """The same pictures for files, each in one piece."""
        epochs, p = self.run.distributions
        if len(epochs) and not single(p[-1]):
            yield learned.distribution(p[-1], int(epochs[-1]))
        yield from self.pictures
        if self.run.diagnosis is not None:
            yield diagnosis.picture(self.run.diagnosis, self.run.done)
        if self.seen is None:
            return
        yield learned.weight_by_magnitude(self.seen, list(by_function(self.seen)), columns=5)
        if len(self.seen.pictures.sample) >= 4:
            yield learned.samples(self.samples, self.seen.epoch)
            yield learned.contrasts(self.samples)
        if (classes := learned.classes(self.seen)) is not None:
            yield classes


@dataclass(frozen=True, eq=False)
class DataPart:
    """The runs on one data set: their results and curves."""

    name: str
    groups: list[Group]

    @cached_property
    def table(self) -> list[Any]:
        return table(self.groups)

    def pictures(self, legend: bool) -> Iterator[Picture]:
        """Curves; a page needs no legend, because colors are those of its table."""
        for key in curves.READINGS:
            wanted = [[run for run in group.runs if curves.has(run, key)] for group in self.groups]
            if any(wanted):
                # Groups without such runs stay, so that a group has the same color in all pictures.
                chosen = [Group(group.label, runs) for group, runs in zip(self.groups, wanted, strict=True)]
                yield curves.over_epochs(chosen, key, legend)


@dataclass(frozen=True, eq=False)
class Report:
    """The runs that a page shows, and sentences about folders that hold none."""

    runs: list[Run]
    empty: list[str]

    @staticmethod
    def of(paths: Sequence[Path]) -> "Report":
        return Report(*runs.find(paths))

    @property
    def finished(self) -> bool:
        """Whether there are runs, and all have a result."""
        return bool(self.runs) and all(run.result is not None for run in self.runs)

    @property
    def heading(self) -> str:
        return "What the policy learned" if any(run.has_policy for run in self.runs) else "How training went"

    @cached_property
    def groups(self) -> list[Group]:
        return groups(self.runs)

    @cached_property
    def data(self) -> list[DataPart]:
        names = dict.fromkeys(group.runs[0].dataset for group in self.groups)
        return [DataPart(name, [group for group in self.groups if group.runs[0].dataset == name]) for name in names]

    @cached_property
    def policies(self) -> list[Policy]:
        found = []
        for group in self.groups:
            runs = [run for run in group.runs if run.seen or len(run.distributions[0]) or len(run.quantiles[0])]
            if runs:
                found.append(Policy(group, max(runs, key=lambda run: run.seen is not None)))
        return found

    @cached_property
    def concerns(self) -> list[tuple[str, list[str]]]:
        found = [(printable(run.folder), concerns(run)) for run in self.runs]
        return [(name, sentences) for name, sentences in found if sentences]

    @cached_property
    def missing(self) -> list[tuple[str, list[str]]]:
        """What the folders of runs lack, after what limits the comparison of runs on one data set."""
        found = [(f"Results on {part.name}", unlike(part.groups) + repeated(part.groups)) for part in self.data]
        found += [(printable(run.folder), run.missing) for run in self.runs]
        return [(name, sentences) for name, sentences in found if sentences]

    def html(self, refresh: int | None = None) -> str:
        """The page; with `refresh`, one that reloads itself after so many seconds."""
        environment = Environment(
            loader=PackageLoader("metaaugment.lab.report", "."), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        environment.filters["address"] = data_address
        return environment.get_template("page.html").render(
            report=self,
            alike=alike(self.groups),
            learned=learned,
            diagnosis=diagnosis,
            preferences=preferences,
            colors=COLORS,
            above=ABOVE,
            below=BELOW,
            precision=PRECISION,
            generator=GENERATOR,
            version=metaaugment.__version__,
            made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S"),
            refresh=refresh,
        )

    def save(self, file: Path, refresh: int | None = None) -> None:
        page = self.html(refresh)
        # A run's folder may have a name that is not text.
        write_atomically(file, lambda part: part.write_text(page, encoding="utf-8", errors="replace"))

    def save_figures(self, folder: Path) -> None:
        """Every picture as PNG and SVG."""
        folder.mkdir(parents=True, exist_ok=True)
        parts = [(part.name, part.pictures(legend=True)) for part in self.data]
        parts += [(policy.run.folder.resolve().name, policy.files()) for policy in self.policies]
        for place, (name, pictures) in enumerate(parts, 1):
            name = re.sub(r"[^\w.-]", "-", name)
            for picture in pictures:
                picture.save(folder, f"{place}-{name}-{picture.name}")


def check_out(file: Path) -> None:
    """Refuse a name that is not a page's, an existing file that is not a report, and a folder that does not exist."""
    if file.suffix not in (".html", ".htm") or file.is_dir():
        raise ValueError(f"--out {file} is not a name for a page; give it the ending .html")
    if file.exists():
        with file.open("rb") as content:
            if GENERATOR.encode() not in content.read(2000):
                raise ValueError(f"--out {file} exists already, and is not a report; choose another name, or remove it")
    if not file.parent.is_dir():
        raise ValueError(f"--out {file} is in a folder that does not exist; make {file.parent} first")


def data_address(image: Tensor) -> str:
    """A uint8 image [c, h, w] as a data URL."""
    picture = Image.fromarray(image.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
    kind = "png" if max(picture.size) <= SMALL else "jpeg"
    content = io.BytesIO()
    picture.save(content, kind, **({"optimize": True} if kind == "png" else {"quality": 85}))
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"


def _cells(relative: np.ndarray, reach: float) -> list[list[tuple[str, str]]]:
    """Text and color of each cell of the map; the last column and the last row are the marginals."""
    whole = np.block([[relative, relative.mean(1, keepdims=True)], [relative.mean(0, keepdims=True), np.ones((1, 1))]])
    colors = tint(whole, reach)
    return [
        [
            (f"{value:.2f}", "rgba({:.0f},{:.0f},{:.0f},{:.3f})".format(*(255 * color[:3]), color[3]))
            for value, color in zip(row, row_colors, strict=True)
        ]
        for row, row_colors in zip(whole, colors, strict=True)
    ]


# -- a report that follows its runs: rewritten whenever one of them has progressed, until all have a result ------------


def watch(paths: Sequence[Path], write: Callable[[Report, int | None], None]) -> None:
    """Pass each state of the runs to `write`, with the seconds after which the page reloads, or None with the last.

    Raises `Interrupted` after a signal.
    """
    before = None
    with Interruption() as interruption:
        while True:
            now = state(paths)
            if now != before:
                report = Report.of(paths)
                write(report, None if report.finished else REFRESH)
                if report.finished:
                    return
                before = now
            time.sleep(LOOK_EVERY)
            if interruption.signum is not None:
                raise Interrupted(interruption.signum)


def state(paths: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Time and size of each file that the page is made from, which change as a run progresses."""
    found = {}
    for folder in (folder for path in paths for folder in run_folders(path)):
        for file in (folder / name for name in (RECIPE, LOG, LOOK, DIAGNOSIS, RESULT)):
            with contextlib.suppress(OSError):
                found[file] = ((about := file.stat()).st_mtime_ns, about.st_size)
    return found
