"""Commands killed at random moments come to the end that they would have come to; `kills.py` makes many more kills."""

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parent / "kills.py"


@pytest.mark.parametrize(
    ("commands", "kills"), [(["export", "report"], 8), pytest.param(["train"], 5, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(commands: list[str], kills: int) -> None:
    words = [sys.executable, str(KILLS), "--kills", str(kills), "--seed", "3", "--commands", *commands]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills; every end is the undisturbed one" in done.stdout


# Writes a file in place and slowly, as a program would that gives no thought to kills.
CARELESS = """
import random, sys, time
from pathlib import Path
import kills
from metaaugment.files import sealed

def write(file, write):
    write(file)
    content = file.read_bytes()
    for end in range(0, len(content), len(content) // 50):
        file.write_bytes(content[:end])
        time.sleep(0.01)
    file.write_bytes(content)

folder = Path(sys.argv[1])
kills.torch.set_num_threads(1)
kills.a_run(folder)
sealed.write_atomically = write
(folder / "export").mkdir()
kills.torment(kills.exporting(folder), 10, folder / "export", random.Random(0))
"""


def test_half_a_file_would_be_seen(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CARELESS, str(tmp_path)]
    done = subprocess.run(words, cwd=KILLS.parent, capture_output=True, text=True)
    assert done.returncode == 1
    assert "policy.safetensors is " in done.stderr.splitlines()[-1], done.stderr
