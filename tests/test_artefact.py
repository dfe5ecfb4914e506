"""The policies that come with the repository: what they are, and that their cards say what was measured."""

import json
import statistics
from pathlib import Path

import pytest
import torch

import metaaugment as ma

ROOT = Path(__file__).parent.parent
FILE = ROOT / "policies" / "omniglot-wrn-40-2.safetensors"
CARD = (ROOT / "policies" / "README.md").read_text()
RESULTS = ROOT / "results" / "omniglot-wrn-40-2"


def test_it_is_small_and_intact() -> None:
    assert FILE.stat().st_size == 4_989_704 < 5_000_000
    assert f"{FILE.stat().st_size:,} bytes" in CARD
    policy = ma.LearnedPolicy.load(FILE)
    assert (policy.source.network, policy.source.num_classes, policy.source.size) == ("wrn-40-2", 1623, (32, 32))
    # Written down: a run under it goes on only if the digest is that of its checkpoint.
    assert policy.digest() == "674df966aec8e7c893d43723984352ddc983d1f059e9dc5ff4150b73017ee3b9"


def test_it_augments_and_weighs_characters() -> None:
    """Strokes on black; weights differ from image to image, and those of an unreadable one are lowest."""
    policy = ma.LearnedPolicy.load(FILE)
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    for place in range(64):
        images[place, :, 4 + place % 20, 6:26] = 255
        images[place, :, 5:27, 4 + place % 23] = 255
    augmented, weights = policy.augment(images, generator=torch.Generator().manual_seed(0))
    assert augmented.shape == images.shape
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights.std()) > 0.02 / 64


@pytest.mark.parametrize(("row", "method", "words"), [
    ("omniglot-wrn-40-2", "baseline", "without augmentation"),
    ("omniglot-wrn-40-2", "randaugment", "RandAugment"),
    ("omniglot-wrn-40-2", "transfer-wrn-40-2", "fresh networks"),
    ("omniglot-wrn-28-10", "baseline", "plain training"),
    ("omniglot-wrn-28-10", "randaugment", "uniform pairs"),
    ("omniglot-wrn-28-10", "metaaugment-fast", "learning a policy"),
    ("omniglot-wrn-28-10", "transfer-wrn-40-2", "under this file"),
])  # fmt: skip
def test_the_card_has_the_figures_of_the_runs(row: str, method: str, words: str) -> None:
    runs = [json.loads(file.read_text()) for file in (ROOT / "results" / row).glob(f"{method}-seed*.json")]
    values = [100 * run["test_accuracy"] for run in runs]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    line = next(line for line in CARD.splitlines() if line.startswith(f"| {words}"))
    assert f"| {statistics.mean(values):.2f}{deviation} | {len(values)} |" in line


def test_the_card_has_the_accuracy_of_the_run_that_made_it() -> None:
    run, *others = (json.loads(file.read_text()) for file in sorted(RESULTS.glob("metaaugment-fast-seed*.json")))
    own, *rest = (f"{100 * each['test_accuracy']:.2f}" for each in (run, *others))
    assert f"| {own} ({', '.join(rest)}) | 1 ({len(rest)}) |" in CARD
    provenance = ma.LearnedPolicy.load(FILE).provenance
    assert provenance["test_accuracy"] == run["test_accuracy"]
    assert provenance["data"] == run["data"]["fingerprint"]
    assert provenance["recipe"] == run["recipe"]
