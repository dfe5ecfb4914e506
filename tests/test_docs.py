"""The site: its blocks run as they stand there, its pictures are drawn by them, and it builds without a warning."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import metaaugment as ma

import pages
from commands import understood

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))

# Blocks that no test machine can run, or not in its time. Each new one is put down here.
NOT_RUN = [
    ("comparing.md", "hours of training"),
    ("comparing.md", "needs the file of such a search"),
    ("comparing.md", "minutes to days of training"),
    ("data.md", "on a terminal"),
    ("data.md", "fetches archives from the internet"),
    ("data.md", "downloads weights"),
    ("data.md", "takes as long as your images"),
    ("index.md", "installs into .venv and trains for some minutes"),
    ("index.md", "82 s on two cores"),
    ("loop.md", "needs a GPU"),
    ("report.md", "it ends when the runs that it follows do"),
    ("scale.md", "several processes"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    runnable = [block for block in pages.blocks(page) if not block.reason]
    assert pages.run(page, tmp_path) == len(runnable)
    for picture in pages.pictures(page):
        folder, _, file = picture.partition("/")
        assert folder == page.stem
        assert (tmp_path / file).read_bytes().startswith(b"\x89PNG")


def test_what_is_not_run_is_known() -> None:
    assert [(page.name, block.reason) for page in PAGES for block in pages.blocks(page) if block.reason] == NOT_RUN


def test_commands_that_are_not_run_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [block for page in PAGES for block in pages.blocks(page) if block.reason and block.language == "sh"]
    shown = [words for block in left for words in pages.commands(block.text) if words[0] == "metaaugment"]
    assert len(understood(shown, monkeypatch)) == len(shown) > 5


NAMED = re.compile(r"\b(test_\w+\.py)(?:::(test_\w+))?")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for file, test in NAMED.findall(page.read_text()):
        assert (TESTS / file).exists(), f"{page.name} names {file}"
        assert not test or f"\ndef {test}(" in (TESTS / file).read_text(), f"{page.name} names {file}::{test}"


def test_reliability_names_a_test_for_every_fault() -> None:
    rows = [line for line in (DOCS / "reliability.md").read_text().splitlines() if line.startswith("| ")]
    faults = [line for line in rows if "what can happen" not in line and line.count(" | ") == 2]
    assert len(faults) > 30
    assert [line for line in faults if not NAMED.search(line.rsplit(" | ", 1)[1])] == []


def test_the_figures_of_imagenet_are_those_of_their_file() -> None:
    figures = json.loads((DOCS.parent / "results" / "bench" / "imagenet-h200.json").read_text())["figures"]
    rows = [line for line in (DOCS / "scale.md").read_text().splitlines() if line.startswith("| ") and "/s" not in line]
    shown = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    told = []
    for figure in figures:
        ratio, peak = figure["over_baseline"], figure["peak_gib"]
        over = "" if ratio in (None, 1.0) else f"{ratio:.3f}"
        told.append([f"{figure['images_per_second']:,.0f}", over, f"{peak:.1f} GiB" if peak else ""])
    assert sorted(shown) == sorted(told)


# -- the runner, which all of the above relies on ----------------------------------------------------------------------


def run(text: str, folder: Path) -> int:
    page = folder / "page.md"
    page.write_text(text)
    (folder / "run").mkdir()
    return pages.run(page, folder / "run")


def test_blocks_share_names_and_folder_and_are_compared(tmp_path: Path) -> None:
    text = """
<!-- setup
a = 1
-->
```python
print(a + 1, "apples")
```
```text
2 ...
```
```python not run: it would fail
raise RuntimeError
```
```console
$ metaaugment train digits --epochs 0
metaaugment: --epochs is 0; it must be ...
$ metaaugment recipes
digits
...
```
"""
    assert run(text, tmp_path) == 4


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", AssertionError, "page.md:6 says"),
        ("```python\n1 / 0\n```\n", ZeroDivisionError, "division"),
        ("```sh\nmetaaugment train digits --epochs 0\n```\n", AssertionError, "page.md:2: .* failed"),
        ("```sh\nls\n```\n", AssertionError, "ls is not a command of ours"),
        ("```console\n$ metaaugment recipes\nno-recipe\n```\n", AssertionError, "page.md:2 says"),
        ("```text\nnothing printed this\n```\n", AssertionError, "page.md:2 says"),
        ("```python sometimes\n1\n```\n", ValueError, "a fence says 'sometimes'"),
        ("```bash\nls\n```\n", ValueError, "'bash' is not run"),
    ],
)
def test_what_a_page_may_not_have(text: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        run(text, tmp_path)


def test_a_traceback_has_the_line_of_the_page(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run("# Title\n\n```python\n1\n1 / 0\n```\n", tmp_path)
    assert raised.traceback[-1].lineno + 1 == 5


# -- the site ----------------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page points to, and what can be pointed to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.ids.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it, elsewhere."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_link_leads_somewhere(site: Path) -> None:
    found = {page: Links(page) for page in site.glob("*.html")}
    assert found.keys() >= {site / page.with_suffix(".html").name for page in PAGES}
    for page, links in found.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert file.exists(), f"{page.name} points to {target}"
            if parts.fragment and file in found:
                assert unquote(parts.fragment) in found[file].ids, f"{page.name} points to {target}"


def test_every_public_name_has_its_place(site: Path) -> None:
    ids = Links(site / "api.html").ids
    assert [name for name in ma.__all__ if f"metaaugment.{name}" not in ids] == []


def test_formulas_and_pictures_need_nothing_from_elsewhere(site: Path) -> None:
    assert "<math " in (site / "maths.html").read_text()
    for page in site.glob("*.html"):
        assert [target for target in Links(page).targets if target.endswith((".js", ".css")) and "//" in target] == []
