"""What a newcomer sees first."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import metaaugment as ma
from metaaugment.lab.report import learned, photos
from metaaugment.lab.report.operations import describe
from metaaugment.learned.source import Source
from metaaugment.ops import INDEX, find_space

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


def test_the_demo_prints_a_table_and_draws_two_pictures(tmp_path: Path) -> None:
    """Of what was trained: called again, it finds the finished runs and says the same."""
    command = [sys.executable, str(DEMO), "--out", str(tmp_path), "--seeds", "2", "--epochs", "2"]
    first, again = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    kept = json.loads((tmp_path / "accuracies.json").read_text())["accuracies"]
    rows = dict(re.findall(r"^ +(baseline|randaugment|metaaugment) +([\d.]+) +[\d.]+ ", first.stdout, re.MULTILINE))
    assert rows.keys() == {"baseline", "randaugment", "metaaugment"}
    for method, mean in rows.items():
        results = [(tmp_path / "runs" / f"{method}-seed{seed}" / "result.json").read_text() for seed in range(2)]
        accuracies = [json.loads(text)["test_accuracy"] for text in results]
        assert float(mean) == pytest.approx(50 * sum(accuracies), abs=0.006)
        assert kept[method] == accuracies
    assert dict(re.findall(r"^ +(\w+) +([\d.]+) +[\d.]+ ", again.stdout, re.MULTILINE)) == rows
    for name in ("distribution.png", "samples.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 500


def test_a_transformation_in_words() -> None:
    t = ma.Transformation(*torch.tensor([[2], [13]]), torch.tensor([[5.0, 0.0]]), torch.tensor([[-1, 1]]))
    assert describe(t, "metaaugment", 32, 32) == ["Rotate -15", "Identity"]
    along = [INDEX[name] for name in ("TranslateX", "TranslateY")]
    t = ma.Transformation(*torch.tensor(along)[:, None], torch.full((1, 2), 10.0), torch.ones(1, 2))
    assert describe(t, "metaaugment", 32, 64) == ["TranslateX 20", "TranslateY 10"]


def test_photos_have_the_sides_and_channels_that_a_policy_was_learned_on(tmp_path: Path) -> None:
    """Of a picture that is red at the left and blue at the right, between white bands, which a low view leaves out."""
    picture = Image.new("RGB", (64, 64), "white")
    picture.paste("red", (0, 16, 32, 48))
    picture.paste("blue", (32, 16, 64, 48))
    picture.save(tmp_path / "picture.png")
    source = Source(None, 2, 3, find_space("metaaugment"), (0.5,) * 3, (0.5,) * 3, (0,) * 3, (16, 32))
    low = photos.read([tmp_path / "picture.png"], source)
    assert low.shape == (1, 3, 16, 32)
    assert low[0, :, :, 0].T.tolist() == [[255, 0, 0]] * 16
    assert low[0, :, :, -1].T.tolist() == [[0, 0, 255]] * 16
    narrow = photos.read([tmp_path / "picture.png"], replace(source, size=(32, 16)))
    assert narrow.shape == (1, 3, 32, 16)
    assert narrow[0, :, 0].tolist() == [[255] * 16] * 3
    grey = replace(source, channels=1, mean=(0.5,), std=(0.5,), fill=(0,))
    luma = photos.read([tmp_path / "picture.png"], grey)
    assert luma.shape == (1, 1, 16, 32)
    assert luma[0, 0, 0, [0, -1]].tolist() == [76, 29]  # 0.299 and 0.114 of 255


def test_samples_are_in_the_order_of_their_weights() -> None:
    n = 40
    identity = torch.full((n,), 13)
    t = ma.Transformation(identity, identity, torch.zeros(n, 2), torch.ones(n, 2))
    weights = torch.arange(1.0, n + 1)
    weights /= weights.sum()
    figure = learned.weighted_samples(torch.zeros(n, 3, 8, 8, dtype=torch.uint8), t, weights, "metaaugment", "")
    titles = [float(axis.get_title().split()[0]) for axis in figure.axes]
    assert titles[:16] == sorted(titles[:16], reverse=True)
    assert titles[16:] == sorted(titles[16:])
    assert titles[0] == pytest.approx(40 * 40 / 820, abs=0.01)
    assert titles[16] == pytest.approx(40 * 1 / 820, abs=0.01)


def test_the_heat_map_shows_multiples_of_uniform() -> None:
    p = torch.full((14, 14), 1 / 196)
    p[3, 5] *= 2
    image: Any = learned.heat_map(p, "").axes[0].images[0]
    assert image.get_array()[3, 5] == pytest.approx(2)
    assert image.norm.vmin + image.norm.vmax == pytest.approx(2)
