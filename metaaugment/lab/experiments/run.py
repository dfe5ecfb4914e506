"""A run: an experiment trained in a folder of its own, and evaluated once on the test set."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.optim import SGD

from metaaugment.distributed import rank, world_size
from metaaugment.lab.data import CorruptImage, DataSet
from metaaugment.lab.data.batches import Batches, Reader, on_device, once, own_part
from metaaugment.lab.experiments.experiment import Experiment, check_sizes, clipped, prepare
from metaaugment.lab.experiments.flags import check_agreement
from metaaugment.lab.experiments.messages import conclude, fault_in_words, introduce, say_idle
from metaaugment.lab.experiments.outcome import write_result
from metaaugment.lab.experiments.paper import RECIPES
from metaaugment.lab.experiments.place import Place, check_threads
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.seeds import LOOKS, ORDER, VALIDATION_ORDER, derived_seed
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.evaluation import evaluate
from metaaugment.lab.training.interruption import Interrupted, Interruption, heeding
from metaaugment.lab.training.json_file import read_json, write_json
from metaaugment.lab.training.launch import launch, restarted
from metaaugment.lab.training.look import Look
from metaaugment.lab.training.machine import deterministic, threads
from metaaugment.lab.training.processes import everyone, first, highest
from metaaugment.lab.training.progress import Bar, Lines, TensorBoard
from metaaugment.lab.training.schedule import cosine
from metaaugment.lab.training.trainer import Phase, Trainer, Watcher, check_identity

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


def trainer(
    experiment: Experiment,
    place: Place,
    out: Path,
    reader: Reader,
    watchers: Sequence[Watcher],
    phases: Sequence[Phase] | None = None,
) -> Trainer:
    """The trainer of an experiment, through the phases of its method unless others are given."""
    recipe, data, device = experiment.recipe, experiment.data, experiment.device
    beside = recipe.policy_batch / recipe.every  # validation images per step
    reader, for_policy = reader.shared_out(beside / (beside + recipe.batch)) if recipe.learns else (reader, reader)
    batches = Batches(on_device(data.train, device), recipe.batch, derived_seed(recipe.seed, ORDER), device, reader)
    validation = Batches(
        on_device(data.val, device), min(recipe.policy_batch, len(data.val)),
        derived_seed(recipe.seed, VALIDATION_ORDER), device, for_policy, middles=True,
    )  # fmt: skip
    looked_at = Batches(batches.split, recipe.batch, derived_seed(recipe.seed, LOOKS), device, Reader(0, reader.skip))
    digits = place.precision or ("bf16" if device.type == "cuda" else "float32")
    assert (digits == "float64") == (experiment.dtype == torch.float64)
    half = partial(torch.autocast, device.type, torch.bfloat16)
    precision = half if digits == "bf16" else contextlib.nullcontext
    optimizer = SGD(
        experiment.network.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay,
        nesterov=recipe.nesterov, fused=device.type == "cuda",
    )  # fmt: skip
    optimizer = clipped(optimizer, recipe.clip)
    steps = recipe.epochs * batches.steps
    rate = cosine(recipe.lr, steps, recipe.warmup_epochs * batches.steps, recipe.warmup_lr)
    policy_rate = cosine(recipe.policy_lr, steps) if recipe.policy_schedule == "cosine" else None
    identity = {
        **recipe.to_json(),
        "device": device.type,
        "precision": digits,
        "data": data.fingerprint(),
        "policy_sha256": experiment.policy_digest(),
        **_about(data),
    }
    phases = phases or experiment.phases()
    # Captured steps were never tried with collectives inside, nor with deterministic algorithms.
    captured = place.capture and device.type == "cuda" and world_size() == 1 and not place.deterministic
    return Trainer(
        experiment.network, optimizer, phases, batches, validation, rate, out, identity, precision,
        captured=captured, watchers=watchers, look=Look(looked_at, data.classes), policy_rate=policy_rate,
        alpha=rate if recipe.real_alpha else None,
    )  # fmt: skip


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


def _about(data: DataSet) -> dict[str, Any]:
    """What an exported policy or network has to know about the data, in types that survive JSON."""
    return {
        "classes": list(data.classes),
        "num_classes": data.num_classes,
        "channels": data.channels,
        "mean": list(data.mean),
        "std": list(data.std),
        "fill": list(data.fill),
        "sides": list(data.val.sides),
    }


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
