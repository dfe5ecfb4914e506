"""The same look at each of several runs, at the network of its last checkpoint; what was seen is printed and kept."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.run import as_it_was
from metaaugment.lab.training.machine import choose_device, commit, machine
from metaaugment.lab.training.trainer import Trainer


@dataclass
class Runs:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    data: Path | None = None
    device: str | None = None
    out: Path | None = None

    def each(self, look: Callable[[Trainer], dict[str, object]], **about: Any) -> None:
        found, code = {}, commit()
        for run in self.runs:
            name = run.name if sum(run.name == other.name for other in self.runs) == 1 else str(run)
            found[name] = look(as_it_was(run, Place(data=self.data, device=self.device), Console()))
            print(name, json.dumps(found[name], indent=1, ensure_ascii=False), flush=True)
        if self.out:
            kept = {"machine": machine(choose_device(self.device)), "commit": code, **about, "runs": found}
            self.out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
