"""The state of a learner: what `load_state_dict` needs, taken whole or refused."""

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from metaaugment.distributed import rank
from metaaugment.sampler import as_sampler

if TYPE_CHECKING:
    from metaaugment.learner import Learner

PARTS = ("policy", "extractor", "sampler")


def state_of(learner: "Learner") -> dict[str, Any]:
    alpha, skipped = learner.alpha.detach().clone(), learner.guard.count.clone()
    state = {"alpha": alpha, "steps": learner.steps, "skipped": skipped, "rank": rank()}
    return state | {name: getattr(learner, name).state_dict() for name in _kept(learner)}


def load(learner: "Learner", state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or not {"alpha", "steps", "skipped"} <= state.keys():
        found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise KeyError(f"this is not the state of a learner (found: {found}); give what its state_dict() returned")
    kept = _kept(learner)
    for name in PARTS:
        # One that is kept elsewhere may be in older states.
        if not _elsewhere(getattr(learner, name)) and (name in kept) != (name in state):
            one, other = ("saved state", "learner") if name in state else ("learner", "saved state")
            raise ValueError(
                f"the {one} has a stateful {name}, but the {other} has none; build the learner with the same parts "
                "as the saved one"
            )
    before = deepcopy(state_of(learner))
    try:
        _load(learner, state, kept)
    except Exception:  # one part of the state is refused: nothing changes
        _load(learner, before, kept)
        raise


@torch.no_grad()
def _load(learner: "Learner", state: Mapping[str, Any], kept: list[str]) -> None:
    for name in kept:
        getattr(learner, name).load_state_dict(state[name])
    if rank() != state.get("rank", 0):
        for tally in as_sampler(learner.sampler).tallies:  # those are another process's, and count once
            tally.zero_()
    learner.alpha.copy_(state["alpha"])
    learner.guard.count.copy_(state["skipped"])
    learner.steps = int(state["steps"])
    learner.alpha_watch.since = None


def _kept(learner: "Learner") -> list[str]:
    """The names of the parts whose state is kept."""
    stateful = {
        "policy": True,
        "extractor": learner.extractor is not None,
        "sampler": as_sampler(learner.sampler).stateful,
    }
    return [name for name in PARTS if stateful[name] and not _elsewhere(getattr(learner, name))]


def _elsewhere(part: object) -> bool:
    """Whether a part, such as one from a policy file, is not the learner's to keep."""
    return getattr(part, "kept_elsewhere", False)
