"""A learned policy, what a policy of a compared system does, and an exported network, in plain words."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metaaugment.embedding import K
from metaaugment.lab.baselines import published
from metaaugment.lab.baselines.found import COUNTS, FoundPolicy, Function, Schedule, SubPolicies
from metaaugment.lab.report.operations import MEANING
from metaaugment.learned.file import FORMAT, policy_name
from metaaugment.learned.policy import LearnedPolicy
from metaaugment.learned.source import space_hash
from metaaugment.ops import INDEX, PAPER_OPS, find_space
from metaaugment.policy import innermost


def in_words(name: Path | str, size: int) -> Iterator[str]:
    """A line on the policy, then one for each sub-policy or stage, for images of so many pixels a side."""
    policy = published.find(name)
    yield f"{name}: {policy.source}"
    if isinstance(policy, SubPolicies):
        yield f"Each image draws one of {len(policy.sub_policies)} sub-policies; ± means a random sign."
        for number, pair in enumerate(policy.sub_policies, 1):
            first, second = (_phrase(policy, function, size) for function in pair)
            yield f"{number:3}. {first}, then {second}"
    if isinstance(policy, Schedule):
        none, one, two = (f"{share:.0%}" for share in COUNTS)
        yield (
            f"{policy.epochs} epochs, stretched to those of a run. Each image gets none ({none}), one ({one}) or two "
            f"({two}) of an epoch's functions, gone through in random order; ± means a random sign."
        )
        begin = 1
        for stage in policy.stages:
            used = [_phrase(policy, function, size) for function in stage.functions if function.probability > 0]
            yield f"epochs {begin} to {begin + stage.epochs - 1}: {'; '.join(used) or 'nothing'}"
            begin += stage.epochs


def _phrase(policy: FoundPolicy, function: Function, size: int) -> str:
    _, saying = MEANING[function.name]
    if function.takes_level:
        level = (space := find_space(policy.space)).levels[function.name]
        index, m = torch.tensor(INDEX[function.name]), torch.tensor(policy.magnitude(function), dtype=torch.float64)
        argument = float(space.arguments(index, m, torch.tensor(1), size, size))
        # Where a coin decides the sign, only the absolute value can be given.
        saying = saying.replace("{", "± {").format(abs(argument)) if level.signed else saying.format(argument)
    return f"{saying} ({100 * function.probability:.3g} %)"


def learned_in_words(policy: LearnedPolicy) -> Iterator[str]:
    """What the file of a learned policy holds."""
    source = policy.source
    height, width = source.size
    yield f"format       {FORMAT}"
    if not policy.modules:
        yield "policy       none: p alone, and all weights are the same"
    else:
        theta, w = policy.modules
        layer: Any = innermost(theta).feature
        yield (
            f"policy       {policy_name(theta)}, {_count(theta):,} parameters, {layer.in_features} features, "
            f"{layer.out_features} hidden units"
        )
        yield (
            f"extractor    {source.network or 'a custom network'}, {_count(w):,} parameters, "
            f"{source.num_classes:,} classes, features at {source.layer or 'its last linear layer'}"
        )
    yield f"images       {source.channels} channels, {height} × {width} pixels, fill {_listed(source.fill)}"
    yield f"normalised   mean {_listed(source.mean)}, std {_listed(source.std)}"
    yield f"space        {source.space.name}, sha256 {space_hash(source.space)}"
    p = policy.probabilities.cpu()
    order = [pair for pair in p.flatten().argsort(descending=True, stable=True).tolist() if p.flatten()[pair] > 0]
    names = [op.name for op in PAPER_OPS]
    for title, pairs in (("likeliest", order[:5]), ("least likely", order[-5:])):
        shown = (f"{names[pair // K]} + {names[pair % K]} {p.flatten()[pair]:.3%}" for pair in pairs)
        yield f"{title:12} {', '.join(shown)}"
    yield f"{'function':12} first, second; {1 / K:.2%} each if uniform"
    for i, name in enumerate(names):
        yield f"{name:12} {p[i].sum():.2%}, {p[:, i].sum():.2%}"
    yield from _origin(policy.provenance)


def network_in_words(about: Mapping[str, Any]) -> Iterator[str]:
    """What the file of an exported network says of it; its weights are for `--pretrained`, or any other program."""
    yield "format       safetensors, an exported task network"
    for name in sorted(about.keys() - {"provenance"}):
        yield f"{name:12} {_said(about[name])}"
    yield from _origin(about["provenance"])


def _origin(provenance: object) -> Iterator[str]:
    yield "provenance"
    for name, value in provenance.items() if isinstance(provenance, dict) else [("", provenance)]:
        yield f"  {name}: {_said(value)}"


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)
