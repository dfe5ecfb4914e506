"""A picture and its description in words, for a page in light or dark colors and for files."""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from metaaugment.files.atomic import write_atomically

# Drawn for white paper. On a page the three neutral colors become the page's own, by their names in page.html; the
# others stand out from white and from black, and can be told apart by the color-blind.
INK, FAINT, PAPER = "#1c2024", "#d5d9dd", "#fefefe"
ON_PAGE = {INK: "var(--ink)", FAINT: "var(--line)", PAPER: "var(--paper)"}
COLORS = ("#2f7fc1", "#d9772b", "#2f9a76", "#b65fa5", "#8a7a1f", "#c7505a", "#7768c8", "#7c858d")
ABOVE, BELOW = (200, 70, 60), (40, 110, 190)  # the mean weight, or the uniform probability

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.parse_math": False,  # class names are not formulas
    "svg.fonttype": "none",
}
ENDINGS = (".png", ".svg", ".pdf", ".jpg")  # of picture files
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, and all that it shows in words: for readers who cannot see it, and for text search."""

    name: str  # of its file
    title: str
    reading: str  # how to read it, in a sentence
    words: str  # what it shows
    figure: Figure

    def svg(self, page: str) -> str:
        """SVG to embed in a page; `page` keeps its ids unique, and text and lines take the page's colors."""
        content = io.StringIO()
        with drawing({"svg.hashsalt": f"{page}-{self.name}"}):
            self.figure.savefig(content, format="svg", transparent=True, metadata=NO_METADATA)
        text = content.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
        text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
        for drawn, shown in ON_PAGE.items():
            text = text.replace(drawn, shown)
        size = re.search(r'viewBox="[^"]*"', text)
        assert size is not None
        head = f'<svg role="img" aria-label="{escape(self.words)}" {size[0]}>'
        return re.sub(r"\n\s*", "\n", head + text[text.index(">") + 1 :])

    def save(self, folder: Path, name: str) -> None:
        """As PNG and as SVG."""
        with drawing({"svg.hashsalt": name}):
            for kind, how in (("png", {"dpi": 150}), ("svg", {"metadata": {"Title": self.words}})):
                draw: Callable[[Path], None] = partial(self.figure.savefig, format=kind, facecolor="white", **how)
                write_atomically(folder / f"{name}.{kind}", draw)


def check(file: Path, flag: str) -> None:
    """Refuse, before the work, a name that no picture can be saved under; nothing is overwritten."""
    if file.suffix.lower() not in ENDINGS or file.is_dir():
        raise ValueError(f"{flag} {file} is not a name for a picture; give it one of the endings {', '.join(ENDINGS)}")
    if file.exists():
        raise ValueError(f"{flag} {file} exists already; choose another name, or remove it")


def save(figure: Figure, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda part: figure.savefig(part, dpi=130, format=file.suffix[1:]))
    return file


@contextmanager
def drawing(more: dict[str, str] | None = None) -> Iterator[None]:
    """A context in the style of the report; also a decorator of a function that draws."""
    style: dict[Any, Any] = {**STYLE, **(more or {})}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the page has fonts of its own
        yield


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one panel; sides in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def show(axes: Axes, image: UInt8[Tensor, "c h w"]) -> None:
    """Draw a grey or color image, pixel by pixel."""
    axes.imshow(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def tint(relative: np.ndarray, reach: float) -> np.ndarray:
    """Colors [..., 4] in 0..1 for multiples of 1: red above, blue below, transparent at 1, for any background."""
    strength = np.clip(np.abs(relative - 1) / reach, 0, 1)
    color = np.where((relative > 1)[..., None], ABOVE, BELOW) / 255
    return np.concatenate([color, 0.92 * strength[..., None]], -1)
