"""A run: an experiment trained in a folder of its own, and evaluated once on the test set."""

import contextlib
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from metaaugment.distributed import rank, world_size
from metaaugment.files.atomic import write_atomically
from metaaugment.lab.data import CorruptImage
from metaaugment.lab.data.batches import Reader, on_device, once, own_part
from metaaugment.lab.experiments.experiment import Experiment, check_sizes, prepare, trainer
from metaaugment.lab.experiments.flags import check_agreement
from metaaugment.lab.experiments.messages import conclude, fault_in_words, introduce, say_idle
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place, check_threads
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.evaluation import Score, evaluate
from metaaugment.lab.training.interruption import Interrupted, Interruption, heeding
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.launch import launch, restarted
from metaaugment.lab.training.machine import deterministic, machine, threads
from metaaugment.lab.training.processes import everyone, first, highest
from metaaugment.lab.training.progress import Bar, Lines, TensorBoard
from metaaugment.lab.training.trainer import Trainer, Watcher, check_identity

# Seconds that restarted processes wait for those before them to release the folder.
DYING = 30.0


def train(recipe: Recipe, place: Place, console: Console, said: Collection[str] = frozenset()) -> dict[str, Any]:
    """Train to the end and write `result.json`; returns what it holds. `said`: as in `check_agreement`.

    With several processes, only the first one reads and writes the folder; all of them act on what it finds there.
    """
    place = first(lambda: _again(recipe, place))
    recipe, resumed = first(lambda: _recorded(recipe, place, said))
    out = place.folder(recipe, "runs")
    place = first(lambda: place.recalled(out)) if resumed else place
    begun = resumed and first(lambda: (out / checkpoint.LAST).exists())
    experiment = prepare(recipe, place, console, fresh=not begun)
    watchers: list[Watcher] = []
    if rank() == 0:
        watchers += [Bar(console) if console.is_terminal else Lines(console)]
        watchers += [TensorBoard(out)] if place.tensorboard else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(deterministic() if place.deterministic else contextlib.nullcontext())
        stack.enter_context(threads(place.computing()))
        result = first(lambda: _enter(out, resumed, stack))
        if result is not None:
            first(lambda: _note_policy(experiment, out))
            console.print(f"{out} is finished already.")
            return result
        reader = Reader(place.readers, place.corrupt == "skip")
        training = trainer(experiment, place, out, reader, watchers)
        began = training.resume() if resumed else False
        with checkpoint.understood(out):
            check_threads(training.threads)
            torch.set_num_threads(place.computing(training.threads))
        # For a continued run this updates where its data and policy lie, now that they are known to be the same.
        first(lambda: place.remember(out, recipe.dataset))
        first(lambda: write_json(out / run_folder.RECIPE, recipe.to_json()))
        introduce(experiment, training, out, began, console)
        say_idle(recipe, said, console)
        # Until the result is written: a signal between the last epoch and the test pass must not get lost.
        interruption = stack.enter_context(Interruption())
        try:
            training.run()
            test = once(on_device(own_part(experiment.data.test), experiment.device), experiment.device, reader)
            with training.precision():
                score = evaluate(experiment.network, heeding(interruption, test), experiment.normalization())
        except Interrupted:
            console.print(
                f"stopped after epoch {training.epoch}, step {training.step}; nothing is lost, continue with: "
                f"{place.command(recipe.name, out)}"
            )
            highest(0)  # waits for all: a launcher kills the others as soon as one of them has ended
            raise
        except CorruptImage as error:
            # Not by removing the file: the data would then differ from those that the run began with.
            raise ValueError(
                f"{error}; leave it out and continue with: {place.command(recipe.name, out, corrupt='skip')}"
            ) from None
        except ValueError:
            # A mistake that the first step shows: once it is fixed, the folder can be named again.
            if rank() == 0:
                run_folder.give_up(out, run_folder.RECIPE)
            raise
        except (OSError, MemoryError, RuntimeError, EOFError) as error:
            if (sentence := fault_in_words(error, recipe, place, out)) is None:
                raise
            raise sentence from None
        unreadable = sorted(set().union(*everyone(reader.unreadable)))
        result = first(lambda: write_result(experiment, training, score, unreadable, out))
    conclude(result, out, console)
    return result


def _again(recipe: Recipe, place: Place) -> Place:
    """Continue a run that its launcher has restarted; a folder that was there before the launch is still refused."""
    out = place.folder(recipe, "runs")
    begun = restarted() and place.resume is None and run_folder.last_locked(out) == launch()
    return replace(place, resume=out, out=None) if begun and (out / run_folder.RECIPE).exists() else place


def _enter(out: Path, resumed: bool, stack: contextlib.ExitStack) -> dict[str, Any] | None:
    """Lock the folder as long as the stack is open; returns the result if the run is finished already."""
    if not resumed:
        run_folder.new(out)
    stack.enter_context(run_folder.locked(out, launch(), DYING if restarted() else run_folder.MOMENT))
    if resumed and (out / run_folder.RESULT).exists():
        return read_json(out / run_folder.RESULT)
    return None


def _note_policy(experiment: Experiment, out: Path) -> None:
    """Note where the policy of a finished run lies now, once it is known to be the same policy."""
    recipe = experiment.recipe
    if read_recipe(out / run_folder.RECIPE).anchored().policy == recipe.policy:
        return
    now = {"policy": str(recipe.policy), "policy_sha256": experiment.policy_digest()}
    check_identity(out / checkpoint.LAST, checkpoint.of_run(out)["identity"], now)
    write_json(out / run_folder.RECIPE, recipe.to_json())


def as_it_was(folder: Path, place: Place, console: Console) -> Trainer:
    """The trainer of a run, with network and learner as its last checkpoint has them; nothing is written."""
    state, place = checkpoint.of_run(folder), place.recalled(folder)
    experiment = prepare(read_recipe(folder / run_folder.RECIPE), place, console, fresh=False)
    training = trainer(experiment, place, folder, Reader(place.readers, place.corrupt == "skip"), [])
    with checkpoint.understood(folder):
        if state["identity"]["data"] != experiment.data.fingerprint():
            raise ValueError(
                f"{folder} was trained on other data than {experiment.data.name} has now: images were added, removed "
                "or changed since, or its own are in another folder; restore the images, or name it with --data DIR"
            )
        check_sizes(experiment.recipe, experiment.data)
        if state["identity"].get("policy_sha256") not in (None, experiment.policy_digest()):
            raise ValueError(
                f"{folder} was trained under another policy than {experiment.policy_name} is now; put that one back, "
                f"or say where it lies: {place.command(experiment.recipe.name, folder)} --policy FILE"
            )
        training.load_learned(state)
    return training


def read_recipe(file: Path) -> Recipe:
    values = read_json(file)
    try:
        return Recipe.from_json(values)
    except ValueError as error:
        raise ValueError(f"{file} cannot be understood: {error}; begin another run with --out") from None


def _recorded(recipe: Recipe, place: Place, said: Collection[str]) -> tuple[Recipe, bool]:
    """The recipe, and whether it resumes a run: then it is the recorded one, and what was asked for must agree."""
    recipe = recipe.anchored()
    if place.resume is None:
        return recipe, False
    folder = place.resumed("run", run_folder.RECIPE)
    recorded = read_recipe(folder / run_folder.RECIPE).anchored()
    if recorded.name != recipe.name:
        raise ValueError(f"{folder} is a run of {recorded.name}, not of {recipe.name}; name {recorded.name} instead")
    if recipe.policy is not None and recorded.policy is not None:
        recorded = replace(recorded, policy=recipe.policy)  # where it lies now; a checkpoint knows it by its content
    check_agreement(folder, recipe, RECIPES[recipe.name](), recorded, said)
    return recorded, True


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
        write_atomically(out / run_folder.UNREADABLE, lambda part: part.write_bytes(names))
    write_json(out / run_folder.RESULT, result)
    return result
