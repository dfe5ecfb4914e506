"""The page of a report: its structure by a parser, and what it does in a browser where there is one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metaaugment.files import sealed
from metaaugment.lab import cli
from metaaugment.lab.experiments.diagnosis import INPUTS, Correlation, Diagnosis
from metaaugment.lab.report.page import Report, data_address, state, watch

from commands import program, refused

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither Chromium nor Chrome is installed")
EVIL = """<script>console.error("evil")</script><img src=x onerror='console.error("evil")'>"'&$x_{1$"""
QUICK = ("--size", "16", "--per-class", "20", "--batch", "50", "--epochs", "3")


class Page(HTMLParser):
    """Elements in order, with their attributes, and the text of each cell of a table."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.text: list[str] = []
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "td":
            self._cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag != "td"

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._cell:
            self.cells[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def map(self) -> np.ndarray:
        """The first map of probabilities: 14 rows of 14, each with its marginal behind it."""
        start = next(place for place, text in enumerate(self.cells) if re.fullmatch(r"\d\.\d\d", text))
        return np.array(self.cells[start : start + 14 * 15], dtype=float).reshape(14, 15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with and without a policy."""
    folder = tmp_path_factory.mktemp("report") / "runs"
    for name, flags in (("policy", ()), ("plain", ("--method", "baseline")), ("frozen", ("--policy-lr", "0"))):
        cli.main(["train", "digits", *QUICK, *flags, "--out", str(folder / name)])
    return folder


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return Report.of([folder]).html()


@pytest.fixture
def page(html: str, tmp_path: Path) -> Path:
    (tmp_path / "report.html").write_text(html)
    return tmp_path / "report.html"


def copied(run: Path, to: Path, **recipe: str) -> Path:
    """A copy of a run, with some fields of its recipe changed."""
    shutil.copytree(run, to)
    written = json.loads((to / "recipe.json").read_text())
    (to / "recipe.json").write_text(json.dumps({**written, **recipe}))
    return to


@contextmanager
def changed(run: Path) -> Iterator[dict[str, Any]]:
    """What a run has seen, written back at the end."""
    look = sealed.load(run / "look.safetensors", "look")
    yield look
    sealed.save(run / "look.safetensors", "look", look)


def relative(run: Path, epoch: int) -> np.ndarray:
    row = json.loads((run / "log.jsonl").read_text().splitlines()[epoch - 1])
    return 196 * np.array(row["probabilities"])


# -- by a parser ------------------------------------------------------------------------------------------------------


def test_every_picture_has_text(html: str) -> None:
    found = Page(html)
    drawings, photographs = found.all("svg"), found.all("img")
    assert len(drawings) > 20
    assert len(photographs) == 2 * (2 * 48 + 16), "of two policies: as it was, augmented, and 16 hard negatives"
    assert all(drawing["role"] == "img" and len(drawing["aria-label"] or "") > 20 for drawing in drawings)
    assert all(len(photograph["alt"] or "") > 3 for photograph in photographs)
    labels = [drawing["aria-label"] for drawing in drawings]
    assert len(set(labels)) == len(labels), "each says what it shows itself"


def test_a_page_of_runs_without_a_policy_does_not_speak_of_one(folder: Path, html: str) -> None:
    def words(html: str) -> str:
        found = Page(re.sub(r"(?s)<(style|script).*?</\1>", "", html))
        labels = [attributes.get("aria-label") or "" for _, attributes in found.elements]
        return " ".join([*found.text, *labels]).lower()

    plain = words(Report.of([folder / "plain"]).html())
    assert "how training went" in plain
    assert "training loss by epoch" in plain
    for word in ("policy", "learned", "weight", "α"):
        assert word in words(html)
        assert word not in plain


def test_nothing_is_loaded_from_elsewhere(html: str) -> None:
    assert not re.search(r'(?:src|href)="(?!data:|#)', html)
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html


def test_names_within_the_page_are_unique_and_lead_somewhere(html: str) -> None:
    found = Page(html)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for _, attributes in found.elements:
        for key in ("href", "xlink:href", "for", "aria-labelledby"):
            target = attributes.get(key) or ""
            if target and not target.startswith("data:"):
                assert target.removeprefix("#") in ids, target


def test_without_a_script_the_last_epoch_is_there(html: str, folder: Path) -> None:
    shown, p = Page(html).map(), relative(folder / "frozen", 3)  # the first by name
    np.testing.assert_allclose(shown[:, :14], p, atol=0.006)
    np.testing.assert_allclose(shown[:, 14], p.mean(1), atol=0.006)


def test_what_is_said_of_the_runs(html: str) -> None:
    text = " ".join("".join(Page(html).text).split())
    assert "Policy idle: it was never updated" in text
    assert "1.00 ×" in text, "plain training beside itself"
    assert "How alike policies are" in text
    assert "hard negative" in text


@pytest.mark.skipif(sys.platform == "darwin", reason="whose file names are text")
def test_a_run_may_lie_in_a_folder_whose_name_is_no_text(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / os.fsdecode(b"caf\xff")
    shutil.copytree(folder / "policy", run)
    Report.of([run]).save(tmp_path / "page.html")
    assert "caf?" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def evil(folder: Path, tmp_path: Path) -> Path:
    """A run whose folder, recipe and classes are markup; a class may also be a formula to others, or no Unicode."""
    run = copied(folder / "policy", tmp_path / EVIL.replace("/", "∕"), name=EVIL, dataset=EVIL, network=EVIL)
    with changed(run) as look:
        look["classes"] = [f"{EVIL}{number}\udcff漢" for number in range(10)]
    return run


def test_names_cannot_become_markup(evil: Path) -> None:
    html = Report.of([evil, evil.parent]).html()
    html.encode()
    assert html.count("<script") == 2, "the data of the map, and the page's own"
    found = Page(html)
    assert not any("onerror" in attributes for _, attributes in found.elements)
    assert all((image["src"] or "").startswith("data:") for image in found.all("img"))
    assert EVIL in "".join(found.text)


def test_a_run_of_200_epochs_stays_small(folder: Path, tmp_path: Path) -> None:
    run = long_run(folder / "policy", tmp_path / "long")
    html = Report.of([run]).html()
    assert len(html.encode()) < 10e6 / 4
    assert Page(html).all("input")[0]["max"] == "199"


def long_run(source: Path, run: Path, epochs: int = 200, samples: int = 4096) -> Path:
    """A run as long as the paper's, made of a short one: its rows with noise, its samples many times."""
    generator = np.random.default_rng(0)
    shutil.copytree(source, run)
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    written = []
    for epoch in range(1, epochs + 1):
        row: dict[str, Any] = {**rows[epoch % len(rows)], "epoch": epoch}
        p = np.array(row["probabilities"]) * generator.uniform(0.8, 1.2, (14, 14))
        row["probabilities"] = (p / p.sum()).round(6).tolist()
        row["val_loss"] *= generator.uniform(0.9, 1.1)
        written.append(json.dumps(row) + "\n")
    (run / "log.jsonl").write_text("".join(written))
    with changed(run) as look:
        places = torch.arange(samples) % len(look["samples"]["weight"])
        look["samples"] = {key: value[places] for key, value in look["samples"].items()}
    return run


def test_classes_that_are_left_out_are_said_in_the_text(folder: Path, tmp_path: Path) -> None:
    """Of as many classes as samples, none of which is seen twice."""
    run = copied(folder / "policy", tmp_path / "run")
    with changed(run) as look:
        n = len(look["samples"]["label"])
        look["samples"]["label"], look["classes"] = torch.arange(n), [f"class {number}" for number in range(n)]
    text = " ".join("".join(Page(Report.of([run]).html()).text).split())
    assert f"Classes left out: {n:,} with fewer than 4 samples here." in text


def test_a_diagnosis_is_drawn_as_large_as_the_curves(folder: Path, tmp_path: Path) -> None:
    """Its text is: drawings share a grid, in which each is as wide as the others."""
    run = copied(folder / "policy", tmp_path / "run")
    some = Correlation(0.3, 0.1)
    found = Diagnosis(500, 100, 100, 0.5, 0.1, {32: some, 50: some}, dict.fromkeys(INPUTS, some), some)
    (run / "diagnosis.json").write_text(json.dumps(found.to_json()))
    html = Report.of([run]).html()
    widths = {drawing["aria-label"]: float((drawing["viewbox"] or "").split()[2]) for drawing in Page(html).all("svg")}
    curve = next(width for words, width in widths.items() if (words or "").startswith("Validation loss"))
    panels = [width for words, width in widths.items() if re.match("Correlations with|Two draws", words or "")]
    assert panels == [curve, curve]
    assert found.verdict() in "".join(Page(html).text)


@pytest.mark.parametrize("missing", ["recipe.json", "log.jsonl", "look.safetensors", "result.json"])
def test_the_rest_is_shown_where_a_part_is_missing(missing: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "policy", tmp_path / "run")
    (tmp_path / "run" / missing).unlink()
    found = Page(Report.of([tmp_path / "run"]).html())
    text = " ".join("".join(found.text).split())
    assert "What is missing" in text
    if missing == "result.json":
        assert "there is no final accuracy yet" in text
    else:
        assert f"there is no {missing}" in text
    assert bool(found.all("img")) == (missing != "look.safetensors")
    assert bool(found.all("input")) == (missing != "log.jsonl")


def test_an_empty_folder_gets_no_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which would replace one that is there; beside a run, the page says so."""
    (tmp_path / "empty").mkdir()
    page = tmp_path / "report.html"
    assert program("report", folder, "--out", page) == 0
    before = page.read_text()
    capsys.readouterr()
    assert "empty holds no run" in refused(capsys, "report", tmp_path / "empty", "--out", page)
    assert page.read_text() == before
    assert "empty holds no run" in Report.of([folder, tmp_path / "empty"]).html()


def test_large_images_are_compressed() -> None:
    photo = torch.randint(0, 255, (3, 96, 96), dtype=torch.uint8)
    assert data_address(photo).startswith("data:image/jpeg;base64,")
    assert data_address(photo[:1, :32, :32]).startswith("data:image/png;base64,")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_page_and_figures(folder: Path, tmp_path: Path) -> None:
    run, out, figures = long_run(folder / "policy", tmp_path / "run"), tmp_path / "page.html", tmp_path / "figures"
    assert program("report", run, "--out", out, "--figures", figures) == 0
    names = {file.stem.split("-")[-1] for file in figures.iterdir()}
    assert names == {"train_loss", "val_loss", "val_accuracy", "alpha", "effective_samples", "distribution", "weights",
                     "marginals", "magnitudes", "samples", "contrasts", "classes"}  # fmt: skip
    for file in figures.glob("*.png"):
        with Image.open(file) as image:
            assert len(image.getcolors(1 << 24) or []) > 2, "something is drawn"
        assert file.with_suffix(".svg").read_text().startswith("<?xml")
    (run / "look.safetensors").unlink()
    assert program("report", run, "--out", out) == 0, "a report may be made anew"


def test_the_command_refuses_in_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.html").write_text("my own page")
    out = ("--out", tmp_path / "page.html")
    assert "does not exist" in refused(capsys, "report", tmp_path / "nothing", *out)
    assert "is a file" in refused(capsys, "report", tmp_path / "mine.html", *out)
    assert "no run is named" in refused(capsys, "report", *out)
    assert "exists already, and is not a report" in refused(capsys, "report", folder, "--out", tmp_path / "mine.html")
    assert "give it the ending .html" in refused(capsys, "report", folder, "--out", tmp_path / "page.png")
    assert "does not exist" in refused(capsys, "report", folder, "--out", tmp_path / "no" / "page.html")
    assert "--figures" in refused(capsys, "report", folder, *out, "--figures", tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "my own page"


def test_a_watched_run_is_shown_anew_until_it_is_finished(folder: Path, tmp_path: Path) -> None:
    run = copied(folder / "policy", tmp_path / "run")
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text(lines[0])
    (run / "look.safetensors").unlink()  # drawing it takes most of the time
    (run / "result.json").rename(tmp_path / "result.json")
    told = []

    def write(report: Report, refresh: int | None) -> None:
        """The trainer goes on each time that it was looked at."""
        epochs = len(report.runs[0].rows)
        told.append((epochs, refresh is not None, "location.reload" in report.html(refresh)))
        if epochs < 3:
            with (run / "log.jsonl").open("a") as log:
                log.write(lines[epochs])
        else:
            shutil.copy(tmp_path / "result.json", run / "result.json")

    watch([run], write)
    assert told == [(1, True, True), (2, True, True), (3, True, True), (3, False, False)]


def test_a_diagnosis_is_seen_by_who_watches(folder: Path, tmp_path: Path) -> None:
    """The page draws it, so that it is made anew when there is one, and when there is another."""
    run = copied(folder / "policy", tmp_path / "run")
    states = [state([run])]
    for written in ("{}", '{"samples": 2}'):
        (run / "diagnosis.json").write_text(written)
        states.append(state([run]))
    assert states[0] != states[1] != states[2]


def test_watching_ends_with_ctrl_c(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "policy", tmp_path / "run")
    for name in ("result.json", "look.safetensors"):
        (tmp_path / "run" / name).unlink()
    save = Report.save

    def interrupted(self: Report, *args: Any) -> None:
        save(self, *args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Report, "save", interrupted)
    assert program("report", tmp_path / "run", "--out", tmp_path / "page.html", "--watch") == 130
    assert "location.reload" in (tmp_path / "page.html").read_text()


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "profile"
    shutil.rmtree(tmp_path / "profile", ignore_errors=True)


def browse(address: str, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page as it is after its script has run, and what it wrote to the console."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
         "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0", *flags, address],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
def test_the_console_is_heard(tmp_path: Path, profile: Path) -> None:
    """What the next tests rely on."""
    (tmp_path / "page.html").write_text("<script>console.error('a fault'); missing();</script>")
    _, console = browse((tmp_path / "page.html").as_uri(), profile, "--dump-dom")
    assert len(console) == 2


@needs_browser
def test_an_address_with_an_epoch_moves_the_map(page: Path, folder: Path, profile: Path) -> None:
    for epoch in (1, 2, 3):
        dom, console = browse(f"{page.as_uri()}#epoch={epoch}", profile, "--dump-dom")
        assert console == []
        np.testing.assert_allclose(Page(dom).map()[:, :14], relative(folder / "frozen", epoch), atol=0.006)
        assert f"After epoch {epoch}, as multiples of uniform: most drawn" in dom
    assert np.abs(relative(folder / "frozen", 1) - relative(folder / "frozen", 2)).max() > 0.02, (
        "maps can be told apart"
    )


@needs_browser
def test_the_slider_moves_the_map(page: Path, folder: Path, profile: Path) -> None:
    """Colors too: red above uniform, blue below. All else is as Python drew it."""
    hand = """<script>var slider = document.querySelector(".map input"); slider.value = 0;
              slider.dispatchEvent(new Event("input"));</script></body>"""
    page.write_text(page.read_text().replace("</body>", hand))
    dom, console = browse(page.as_uri(), profile, "--dump-dom")
    assert console == []
    moved, p = Page(dom), relative(folder / "frozen", 1)
    np.testing.assert_allclose(moved.map()[:, :14], p, atol=0.006)
    colors = [cell["style"] or "" for cell in moved.all("td") if "rgba(" in (cell.get("style") or "")][:14]
    red = [color.split("(")[1].startswith("200") for color in colors]
    assert all(is_red == (value > 1) for is_red, value in zip(red, p[0], strict=True) if abs(value - 1) > 0.01)
    assert moved.all("input")[0]["aria-valuetext"] == "epoch 1"


@needs_browser
@pytest.mark.parametrize(("scheme", "dark"), [("0", True), ("1", False)])
def test_both_color_modes(scheme: str, dark: bool, page: Path, profile: Path) -> None:
    """Paper and ink are exchanged, for text and in drawings."""
    file = page.with_suffix(".png")
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=390,3000", f"--screenshot={file}")
    _, console = browse(page.as_uri(), profile, *flags)
    assert console == []
    with Image.open(file) as image:
        grey = np.asarray(image.convert("L")).astype(int)
    assert grey.shape == (3000, 390), "a phone"
    assert (np.median(grey) < 60) == dark
    assert (grey > 200).mean() > 0.005
    assert (grey < 60).mean() > 0.005


@needs_browser
def test_names_are_not_executed(evil: Path, tmp_path: Path, profile: Path) -> None:
    Report.of([evil]).save(tmp_path / "page.html")
    _, console = browse((tmp_path / "page.html").as_uri(), profile, "--dump-dom")
    assert console == []
