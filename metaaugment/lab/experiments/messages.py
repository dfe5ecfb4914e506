"""What a run tells its user: what it trains, which flags have no effect, its result, and how to go on after a fault."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metaaugment.distributed import rank, world_size
from metaaugment.guard import faults
from metaaugment.lab.data import DATASETS, DataSet, ImageFiles
from metaaugment.lab.experiments import validity
from metaaugment.lab.experiments.experiment import Experiment
from metaaugment.lab.experiments.flags import flag
from metaaugment.lab.experiments.methods import METHODS, copies
from metaaugment.lab.experiments.place import Place
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.trainer import Trainer
from metaaugment.lab.words import duration, number_of, series


def introduce(experiment: Experiment, trainer: Trainer, out: Path, resumed: bool, console: Console) -> None:
    """Print what is about to be trained, on what, and what an epoch costs."""
    recipe, data, learner = experiment.recipe, experiment.data, trainer.learner
    device = torch.cuda.get_device_name(experiment.device) if experiment.device.type == "cuda" else "the CPU"
    parameters = sum(parameter.numel() for parameter in experiment.network.parameters())
    updates = trainer.train.steps / recipe.every if recipe.learns else 0
    number, noun = f"{updates:,.1f}".removesuffix(".0"), "update" if updates == 1 else "updates"
    # Extra cost in plain steps, by `metaaugment bench step` on an H200: 0.8 for a lagged policy update, 1.4 for an
    # exact one, 0.7 for each mini-batch of validation images. Other routes, and a policy's own extractor, cost more.
    images = trainer.validation.batch / trainer.train.batch
    cost = learner.copies + ((0.8 if recipe.lagged else 1.4) * learner.copies + 0.7 * images) / recipe.every
    known = recipe.route == "difference" and learner.extractor is None
    console.print(
        f"{recipe.name}: {recipe.method}"
        + (f" by {experiment.policy_name}" if experiment.policy_name else "")
        + f" on {device}"
        + (f", {world_size()} processes" if world_size() > 1 else "")
        + f"; {recipe.dataset}, "
        f"{len(data.train):,} / {len(data.val):,} / {len(data.test):,} images in {data.num_classes:,} classes; "
        f"{recipe.network}, {parameters / 1e6:.1f} M parameters; an epoch is "
        f"{number_of('step', trainer.train.steps)} of {recipe.batch * learner.copies} images"
        + (f" and {number} policy {noun} of {trainer.validation.batch} validation images" if updates else "")
        + (f", about {cost:.1f} × plain training on a GPU" if updates and known else "")
        + f"; into {out}",
        soft_wrap=True,
    )
    say_data(data, console)
    console.print(before_the_method(recipe, data), soft_wrap=True)
    if recipe.learns and recipe.joint_epochs * updates < 1:
        console.print(
            f"the policy will never be updated: --every is {recipe.every}, and it has only "
            f"{number_of('step', recipe.joint_epochs * trainer.train.steps)} to learn in; lower --every, or train "
            "longer"
        )
    if resumed:
        console.print(f"continuing after epoch {trainer.epoch}, step {trainer.step}")


def say_data(data: DataSet, console: Console) -> None:
    """Print what a user should know about the data."""
    if data.note:
        console.print(data.note, soft_wrap=True)
    if data.dim is not None and data.dim.white is not None:
        console.print(
            f"if {data.dim.white} is white in these images, begin anew with --white {data.dim.white}", soft_wrap=True
        )


def before_the_method(recipe: Recipe, data: DataSet) -> str:
    """What happens to an image in every method, baseline included, and the flags that turn it off."""
    steps, off, evaluation = [], [], "evaluation: the whole image"
    if isinstance(data.train, ImageFiles):
        square = " × ".join(map(str, data.train.sides))
        evaluation = f"evaluation: the {'whole' if recipe.area_min == 1 else 'middle'}, at {square}"
        if recipe.area_min == 1:
            steps += [f"all of it, at {square}"]
        else:
            steps += [f"a random part of {100 * recipe.area_min:g} to 100 % of its area, at {square}"]
            off += ["--area-min 1"]
    if recipe.flip:
        steps += ["flipped left and right half of the time"]
        off += ["--no-flip"]
    crop = METHODS[recipe.method].crop
    if padding := getattr(recipe, crop):
        steps += [f"padded by {padding} pixels and cropped at random"]
        off += [f"{flag(crop)} 0"]
    turned_off = f" (turned off by {' '.join(off)})" if off else ""
    return f"before the method, each training image: {', '.join(steps) or 'as it is'}{turned_off}; {evaluation}"


def say_idle(recipe: Recipe, said: Collection[str], console: Console) -> None:
    """Print which of the given flags have no effect, and why."""
    idle = validity.idle(recipe)
    for why in dict.fromkeys(idle.values()):
        if names := [flag(name) for name in sorted(said) if idle.get(name) == why]:
            verb = "has" if len(names) == 1 else "have"
            console.print(f"{', '.join(names)} {verb} no effect: {why}", soft_wrap=True)


def conclude(result: dict[str, Any], out: Path, console: Console) -> None:
    if result["unreadable_files"]:
        skipped = number_of("image file", result["unreadable_files"])
        console.print(f"skipped {skipped} that could not be read; see {out / run_folder.UNREADABLE}", soft_wrap=True)
    accuracy = run_folder.accuracy_key(result)
    words = "test accuracy" if accuracy == "test_accuracy" else "accuracy on held-back images"
    top5 = accuracy.replace("accuracy", "top5")
    further = f", top-5 {result[top5]:.2%}" if DATASETS[result["recipe"]["dataset"]].top5 else ""
    console.print(
        f"{words} {result[accuracy]:.2%}{further} after {number_of('epoch', result['epochs'])} in "
        f"{duration(result['seconds'])}; {out / run_folder.RESULT}",
        soft_wrap=True,
    )


def fault_in_words(error: Exception, recipe: Recipe, place: Place, out: Path) -> Exception | None:
    """A fault of the machine as an error that says how to continue the run; None for any other fault."""
    written = (out / checkpoint.LAST).exists()
    kept = "everything up to the last checkpoint is kept" if written else "there is no checkpoint yet"
    command = place.command(recipe.name, out)
    if memory := faults.full_memory(error):
        words = [f"--batch {recipe.batch}"]
        words += [f"--copies {copies(recipe)}"] * (copies(recipe) > 1)  # the method's, if the recipe sets none
        words += [f"--policy-batch {recipe.policy_batch}"] * recipe.learns
        full = f"{memory} with {series(words, 'and')}"
        if rank() == 0 and run_folder.give_up(out, run_folder.RECIPE):
            return ValueError(f"{full}; begin again with less: nothing was trained yet")
        return ValueError(
            f"{full}; {kept}: with more memory, or with more processes, continue with: {command}; "
            "or begin another run with less, and another --out"
        )
    if lost := faults.lost_reader(error):
        fewer = place.command(recipe.name, out, workers=place.readers // 2)
        return ValueError(f"{lost}, as happens when memory is short; {kept}, continue with fewer of them: {fewer}")
    if isinstance(error, OSError) and error.errno is not None and (out / run_folder.RECIPE).exists():
        way = f"{error.strerror}; {kept}; once that is fixed, continue with: {command}"
        return OSError(error.errno, way, error.filename)
    return None
