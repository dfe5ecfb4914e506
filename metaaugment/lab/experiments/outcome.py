"""What a run comes to: the figures that it leaves in its folder when it has finished."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from metaaugment.distributed import world_size
from metaaugment.files.atomic import write_atomically
from metaaugment.lab.experiments.experiment import Experiment
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.evaluation import Score
from metaaugment.lab.training.json_file import write_json
from metaaugment.lab.training.machine import machine
from metaaugment.lab.training.trainer import Trainer

UNREADABLE = "unreadable.txt"  # in the folder of a run that skipped such files


def write_result(
    experiment: Experiment, trainer: Trainer, score: Score, unreadable: Sequence[Path], out: Path
) -> dict[str, Any]:
    """The result of a run, which is also written into its folder, with a list of files that could not be read."""
    rows, recipe = trainer.log.rows, experiment.recipe
    seconds = sum(row["seconds"] for row in rows)
    cuda = experiment.device.type == "cuda"
    images = "held_back" if recipe.held_back else "test"  # figures on other images must not be called test figures
    result = {
        "name": recipe.name,
        "method": recipe.method,
        "seed": recipe.seed,
        f"{images}_accuracy": score.top1,
        f"{images}_top5": score.top5,
        f"{images}_loss": score.loss if math.isfinite(score.loss) else None,  # as in the log: JSON has no inf or nan
        "val_accuracy": rows[-1]["val_accuracy"],
        "epochs": trainer.epoch,
        "precision": trainer.identity["precision"],
        "policy": experiment.policy_name,
        "policy_sha256": trainer.identity["policy_sha256"],
        "space": trainer.learner.space.name,
        "copies": trainer.learner.copies,
        "seconds": seconds,
        "images_per_second": sum(row["images_per_second"] * row["seconds"] for row in rows) / seconds,
        "peak_memory_mib": torch.cuda.max_memory_allocated(experiment.device) / 2**20 if cuda else None,
        "unreadable_files": len(unreadable),
        "data": {
            "fingerprint": trainer.identity["data"],
            "train": len(experiment.data.train),
            "val": len(experiment.data.val),
            "test": len(experiment.data.test),
        },
        "recipe": recipe.to_json(),
        "machine": {**machine(experiment.device.type), "processes": world_size()},
        "commit": trainer.commits,
    }
    if unreadable:
        # In the bytes of the file system: a name need not be text.
        names = b"".join(os.fsencode(file) + b"\n" for file in unreadable)
        write_atomically(out / UNREADABLE, lambda part: part.write_bytes(names))
    write_json(out / run_folder.RESULT, result)
    return result


def accuracy_key(result: Mapping[str, Any]) -> str:
    """The key of a run's accuracy: on the test images, or on images that were held back."""
    return "held_back_accuracy" if "held_back_accuracy" in result else "test_accuracy"
