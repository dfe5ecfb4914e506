"""What a run has learned, to be used elsewhere: its policy, and its network."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from metaaugment.features import feature_dim
from metaaugment.files.atomic import write_atomically
from metaaugment.lab.data.augment import normalization
from metaaugment.lab.experiments.methods import METHODS
from metaaugment.lab.experiments.recipe import Recipe
from metaaugment.lab.training import checkpoint
from metaaugment.lab.training import folder as run_folder
from metaaugment.lab.training.folder import accuracy_key
from metaaugment.lab.training.json_file import read_json
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learner import Learner
from metaaugment.networks import network
from metaaugment.sampler import FixedSampler


def learned_policy(folder: Path) -> LearnedPolicy:
    """The policy of a run's last checkpoint, with the network that it sees through."""
    state = checkpoint.of_run(folder)
    with checkpoint.understood(folder):
        return _learned(folder, state)


def save_network(folder: Path, file: Path, half: bool = False) -> None:
    """Write the task network of a run's last checkpoint, as plain safetensors such as `--pretrained` reads.

    The metadata, JSON each, are what one has to know besides to use it: the network's name, the names of the classes
    in the order of its outputs, the side of its inputs, how image files become these, and the mean and deviation that
    they are normalized by.
    """
    state = checkpoint.of_run(folder)
    with checkpoint.understood(folder):
        about, recipe = state["identity"], _recipe(state)
        weights = {
            name: value.half() if half and value.is_floating_point() else value
            for name, value in state["network"].items()
        }
        names = ("classes", "num_classes", "channels", "sides", "mean", "std")
        known = {name: about[name] for name in names if name in about}  # older checkpoints do not name the classes
        known |= {"area_min": recipe.area_min, "white": recipe.white}  # how image files become its inputs
        known |= {"network": recipe.network, "provenance": _provenance(folder, recipe, state)}
        content = save(weights, {name: json.dumps(value) for name, value in known.items()})
    write_atomically(file, lambda part: part.write_bytes(content))


def about_network(file: Path) -> dict[str, Any] | None:
    """What `save_network` wrote beside the weights; None for any other file, readable or not."""
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as content:
            about = {name: json.loads(text) for name, text in (content.metadata() or {}).items()}
    except (OSError, SafetensorError, ValueError, RecursionError):
        return None
    return about if {"network", "provenance"} <= about.keys() else None


def _recipe(state: dict[str, Any]) -> Recipe:
    about = state["identity"]  # under the checkpoint's seal, unlike recipe.json
    return Recipe.from_json({field.name: about[field.name] for field in fields(Recipe) if field.name in about})


def _learned(folder: Path, state: dict[str, Any]) -> LearnedPolicy:
    about, recipe = state["identity"], _recipe(state)
    if not recipe.learns:
        under = f"under {recipe.policy}" if recipe.policy is not None else f"by {recipe.method}"
        raise ValueError(
            f"{folder} was trained {under} and has learned no policy; name a joint run of metaaugment, or export the "
            "trained network with --network"
        )
    with torch.device("meta"):  # allocates nothing: the sizes that a file claims are not to be trusted
        net = network(recipe.network, about["num_classes"], about["channels"])
    # In the frozen phase the policy sees through the network as it was when that phase began.
    net.load_state_dict(state["learner"].get("extractor", state["network"]), assign=True)
    method = METHODS[recipe.method]
    if "policy" not in state["learner"] or not state["learner"]["policy"]:
        raise ValueError(
            f"{folder} is still in its {recipe.random_epochs} random epochs and has learned no policy yet; wait until "
            "they are over"
        )
    with torch.device("meta"):
        policy = method.policy(recipe, feature_dim(net), about["num_classes"])
    policy.load_state_dict(state["learner"]["policy"], assign=True)
    prepare = normalization(about["mean"], about["std"], torch.device("cpu"), torch.contiguous_format)
    sampler = FixedSampler()
    sampler.load_state_dict(state["learner"]["sampler"])
    learner = Learner(net, sampler, policy, prepare=prepare, space=recipe.space, fill=about["fill"])
    return LearnedPolicy.from_learner(
        learner, recipe.network, about["num_classes"], about["mean"], about["std"], about["sides"],
        _provenance(folder, recipe, state),
    )  # fmt: skip


def _provenance(folder: Path, recipe: Recipe, state: dict[str, Any]) -> dict[str, Any]:
    """Where a checkpoint comes from; what only the result of a run says is left out until the run has ended."""
    result = folder / run_folder.RESULT
    known = read_json(result) if result.exists() else {}
    about = {
        "recipe": recipe.to_json(),
        "epoch": state["epoch"],
        "data": state["identity"]["data"],
        accuracy_key(known): known.get(accuracy_key(known)),
        "val_accuracy": known.get("val_accuracy"),
        "machine": known.get("machine"),
        "commit": known.get("commit") or state.get("commit"),
    }
    return {name: value for name, value in about.items() if value is not None}
