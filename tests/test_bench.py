"""The benches run and report what they measured; how fast is for them to say, not for a test."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from metaaugment.lab.bench import ops, record, step, transfer

from commands import program


def test_a_slow_moment_of_the_machine_meets_all_and_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: 2 and 5 seconds a call, 100 more at the first, and ten times as many in two rounds."""
    now, log = [0.0], []

    def takes(name: str, seconds: float) -> None:
        now[0] += seconds + 100 * (name not in log)
        now[0] += 9 * seconds * (20 <= len(log) < 34)
        log.append(name)

    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"quick": lambda: takes("quick", 2.0), "slow": lambda: takes("slow", 5.0)}
    assert record.by_turns(calls, 70.0, "cpu") == {"quick": 2.0, "slow": 5.0}
    a_round = ["quick"] * 5 + ["slow"] * 2
    assert log == ["quick"] * 2 + ["slow"] * 2 + a_round * 7


def test_ops_compares_systems_on_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAAUGMENT_COMMIT", "abc")
    monkeypatch.setattr(ops, "CASES", {"cpu": [(6, 8)]})
    ops.run(0.02, "cpu", tmp_path / "figures.json")
    record = json.loads((tmp_path / "figures.json").read_text())
    systems = {figure["system"]: figure for figure in record["figures"]}
    assert {"metaaugment", "Pillow, image by image", "Pillow, in two processes"} <= set(systems)
    ours = systems["metaaugment"]["images_per_second"]
    for figure in systems.values():
        assert figure["ours_over_it"] == pytest.approx(ours / figure["images_per_second"])
    assert record["machine"]["torch"]
    assert record["commit"] == "abc"


def test_step_compares_routes(tmp_path: Path) -> None:
    step.run(("small-cnn",), 4, 0.02, "cpu", tmp_path / "figures.json")
    record = json.loads((tmp_path / "figures.json").read_text())
    figures = {figure["variant"]: figure for figure in record["figures"]}
    assert figures["plain"]["over_plain"] == 1
    assert {"difference, exact", "difference, lagged", "forward, lagged", "double backward, lagged"} <= set(figures)
    assert "difference, lagged, every 8 by 8" in figures


def test_unknown_network_is_named() -> None:
    with pytest.raises(ValueError, match="unknown network 'x'"):
        step.run(("x",), 4, 0.02, "cpu", None)


def test_transfer_compares_with_a_plain_step(tmp_path: Path) -> None:
    transfer.run(4, 0.02, "cpu", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert [figure["step"] for figure in figures] == ["plain", "under the policy", "under p alone"]
    assert figures[0]["over_plain"] == 1


@pytest.mark.parametrize("bench", ["ops", "step", "transfer"])
def test_figures_of_another_bench_are_not_written_over(
    bench: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "figures.json").write_text("of another")
    assert program("bench", bench, "--out", tmp_path / "figures.json") == 2
    assert "figures.json, which exists already; choose another name" in capsys.readouterr().err
    assert (tmp_path / "figures.json").read_text() == "of another"
