"""The augmentation policy network P(f(T(x)), e(T); θ), and what else a policy may be."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from metaaugment.algorithm import normalize
from metaaugment.distributed import total, whole_length
from metaaugment.embedding import K

Head = Callable[[Tensor], Tensor]


LARGEST = 15.0  # bound on the |logarithm| of an output: a larger ratio of weights says nothing more


def exponential(x: Tensor) -> Tensor:
    """exp, kept from overflowing."""
    return x.clamp(-LARGEST, LARGEST).exp()


def positive(outputs: Float[Tensor, "n 1"]) -> Float[Tensor, " n"]:
    """The outputs of a head, kept from underflowing: if all were zero, their weights would be 0 / 0."""
    return outputs.squeeze(1).clamp(min=torch.finfo(outputs.dtype).tiny)


class Policy(nn.Module):
    """From features [n, d] and embeddings [n, 28] to outputs [n] of 0 or above; all that follows may be left as it is.

    Modules of another class are taken, too: what they have of it counts, by the same names.
    """

    sees: tuple[str, ...] = ()  # names in `EVIDENCE` of further inputs, passed after the embedding
    blind = False  # it does not look at transformations, so functions without an embedding may be drawn
    equal = False  # it gives all samples the same output
    kept_elsewhere = False  # a learner does not keep its state

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The weights V that outputs P become."""
        return normalize(outputs)

    def objective(self, outputs: Float[Tensor, " n"], alignment: Float[Tensor, " n"]) -> Tensor:
        """What a subclass learns by instead of Eq. 3: this process's part of a loss."""
        raise TypeError(f"{type(self).__name__} learns by Eq. 3 and has no objective of its own")

    def has_own(self, name: str) -> bool:
        """Whether it has a `normalize` or an `objective` of its own."""
        return name in vars(self) or getattr(type(self), name) is not getattr(Policy, name)

    def evidence(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """What it is given besides feature and embedding, computed from the network's logits and the labels."""
        return tuple(EVIDENCE[name](logits, labels) for name in self.sees)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MEMBERS and isinstance(value, nn.Module | Tensor):
            raise ValueError(f"a layer cannot be called {name!r}, which says something else of a policy; rename it")
        super().__setattr__(name, value)


MEMBERS = ("sees", "blind", "equal", "kept_elsewhere", "normalize", "objective", "has_own", "evidence")


class Adapted(Policy):
    """A module of another class as a `Policy`: the one place where it is asked what it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.sees = getattr(module, "sees", ())
        self.blind = getattr(module, "blind", False)
        self.equal = getattr(module, "equal", False)
        self.kept_elsewhere = getattr(module, "kept_elsewhere", False)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return (getattr(self.module, "normalize", None) or super().normalize)(outputs)

    def objective(self, outputs: Float[Tensor, " n"], alignment: Float[Tensor, " n"]) -> Tensor:
        return (getattr(self.module, "objective", None) or super().objective)(outputs, alignment)

    def has_own(self, name: str) -> bool:
        # A policy inside, as in torch.compile's wrapper, says so itself.
        said = getattr(self.module, "has_own", None)
        return getattr(self.module, name, None) is not None if said is None else said(name)


def as_policy(module: nn.Module) -> Policy:
    """A policy as it is, or a module of another class as one."""
    return module if isinstance(module, Policy) else Adapted(module)


class PolicyNetwork(Policy):
    """Embedding and feature each go through a layer of 100 and ReLU, then together to one sigmoid output (Sec. 4).

    Args:
        feature_dim: how many numbers a feature has.
        hidden: units of each layer.
        head: maps the last layer to positive numbers; `exponential` does not saturate when all outputs grow together.
    """

    def __init__(self, feature_dim: int, hidden: int = 100, head: Head = torch.sigmoid) -> None:
        super().__init__()
        self.head = head
        self.embedding = nn.Linear(2 * K, hidden)
        self.feature = nn.Linear(feature_dim, hidden)
        self.output = nn.Linear(2 * hidden, 1)

    def forward(
        self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"], *evidence: Tensor
    ) -> Float[Tensor, " n"]:
        check_features(features, self.feature)
        parts = [self.embedding(embedding), self.feature(features), *self.further(*evidence)]
        return positive(self.head(self.output(torch.cat(parts, dim=1).relu())))

    def further(self, *evidence: Tensor) -> list[Tensor]:
        """Hidden units that join those of embedding and feature, before ReLU."""
        return []


class CluePolicy(PolicyNetwork):
    """A policy network that also sees how sure the network is of the sample's label; ours, not the paper's."""

    sees = ("clues",)

    def __init__(self, feature_dim: int, hidden: int = 100, head: Head = torch.sigmoid) -> None:
        super().__init__(feature_dim, hidden, head)
        self.clues = nn.Linear(3, hidden)
        self.output = nn.Linear(3 * hidden, 1)

    def further(self, *evidence: Tensor) -> list[Tensor]:
        return [self.clues(evidence[0].to(self.clues.weight.dtype))]


class LabelPolicy(CluePolicy):
    """A `CluePolicy` that also sees the label itself, as an embedding: many classes cost nothing."""

    sees = ("clues", "labels")

    def __init__(self, feature_dim: int, hidden: int = 100, head: Head = torch.sigmoid, *, num_classes: int) -> None:
        super().__init__(feature_dim, hidden, head)
        self.label = nn.Embedding(num_classes, hidden)
        self.output = nn.Linear(4 * hidden, 1)

    def further(self, *evidence: Tensor) -> list[Tensor]:
        clues, labels = evidence
        check_classes(labels, self.label.num_embeddings, "the policy")
        return [*super().further(clues), self.label(labels)]


class FeaturePolicy(Policy):
    """The policy network without the embedding's branch: the paper's ablation "o.TE"."""

    blind = True

    def __init__(self, feature_dim: int, hidden: int = 100, head: Head = torch.sigmoid) -> None:
        super().__init__()
        self.head = head
        self.feature = nn.Linear(feature_dim, hidden)
        self.output = nn.Linear(hidden, 1)

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        check_features(features, self.feature)
        return positive(self.head(self.output(self.feature(features).relu())))


class UniformPolicy(Policy):
    """Every sample counts the same; nothing is learned."""

    blind = equal = True

    def forward(self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"]) -> Float[Tensor, " n"]:
        return embedding.new_ones(len(embedding))


# -- a policy around another one ---------------------------------------------------------------------------------------


class Around(Policy):
    """Another policy; a subclass says what is changed about it."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    @property
    def inner(self) -> Policy:
        return as_policy(self.policy)

    @property
    def sees(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.sees

    @property
    def blind(self) -> bool:  # type: ignore[override]
        return self.inner.blind

    @property
    def equal(self) -> bool:  # type: ignore[override]
        return self.inner.equal

    def forward(
        self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"], *evidence: Tensor
    ) -> Float[Tensor, " n"]:
        return self.policy(features, embedding, *evidence)

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return self.inner.normalize(outputs)

    def objective(self, outputs: Float[Tensor, " n"], alignment: Float[Tensor, " n"]) -> Tensor:
        return self.inner.objective(outputs, alignment)

    def has_own(self, name: str) -> bool:
        own = name in vars(self) or getattr(type(self), name) is not getattr(Around, name)
        return own or self.inner.has_own(name)


class RejectingPolicy(Around):
    """Another policy, with no weight for samples whose output is below the mini-batch mean: an ablation of the paper's.

    The sampler sees the other policy's outputs, unchanged.
    """

    def normalize(self, outputs: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        count = whole_length(outputs)
        mean = total(outputs.detach().sum()) / count
        # Rounding may put the mean of equal numbers above them.
        return normalize(outputs * (outputs >= mean * (1 - 8 * torch.finfo(mean.dtype).eps)))


class RegressingPolicy(Around):
    """Another policy, which learns to predict the alignment itself; a sample's weight grows with the prediction.

    The prediction is the logarithm of the other policy's output, in standard deviations of the mini-batch: one target
    per sample and step, where Eq. 3 has one number per step. The weights that lower the validation loss most grow with
    the expected alignment, so it is enough to predict that.

    Args:
        policy: one with the head `exponential`.
        sharpness: how much the logarithm of a weight grows with each predicted standard deviation; at most 5.
    """

    def __init__(self, policy: nn.Module, sharpness: float = 1.0) -> None:
        super().__init__(policy)
        check_sharpness(sharpness)
        self.sharpness: Tensor
        self.register_buffer("sharpness", torch.tensor(float(sharpness)))

    def forward(
        self, features: Float[Tensor, "n d"], embedding: Float[Tensor, "n 28"], *evidence: Tensor
    ) -> Float[Tensor, " n"]:
        return exponential(self.sharpness * super().forward(features, embedding, *evidence).log())

    def objective(self, outputs: Float[Tensor, " n"], alignment: Float[Tensor, " n"]) -> Tensor:
        """This process's share of the mean squared error of the predictions over the global mini-batch."""
        s = alignment.detach()
        count = whole_length(s)
        s = s - total(s.sum()) / count
        deviation = (total(s.square().sum()) / count).sqrt().clamp(min=torch.finfo(s.dtype).tiny)
        return (outputs.log() / self.sharpness - s / deviation).square().sum() / count


def check_sharpness(sharpness: float) -> None:
    if not 0 < sharpness <= 5:
        raise ValueError(f"sharpness is {sharpness:g}; it must be above 0, and at most 5")


# -- what a policy is given --------------------------------------------------------------------------------------------


def clues(logits: Float[Tensor, "n c"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n 3"]:
    """Loss, probability of the label and entropy of each sample, all of order one: log(1 + loss), p, H / log c."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; a policy that looks at them takes class "
            "numbers [n]"
        )
    check_classes(labels, logits.shape[1], "the network that the policy sees through")
    # The log-probability of a class that is ruled out is −∞; clamped, it adds 0 to the entropy instead of NaN.
    known = F.log_softmax(logits.detach().float(), dim=1).clamp(min=-1e4)
    loss = -known.gather(1, labels.long()[:, None]).squeeze(1)
    entropy = -(known.exp() * known).sum(1) / math.log(logits.shape[1])
    return torch.stack([loss.log1p(), (-loss).exp(), entropy], dim=1)


EVIDENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clues": clues,
    "labels": lambda logits, labels: labels.long(),
}


def check_classes(labels: Tensor, classes: int, whose: str) -> None:
    """Only on the CPU: on a GPU the host would have to wait."""
    if labels.device.type != "cpu" or not len(labels):
        return
    least, most = int(labels.min()), int(labels.max())
    if most >= classes:
        raise ValueError(
            f"a label is {most}, but {whose} knows {classes} classes; use the policy on the classes that it was "
            "learned with"
        )
    if least < 0:
        raise ValueError(
            f"a label is {least}, but a policy that looks at labels takes class numbers of 0 and above; use one that "
            "does not look at them, such as PolicyNetwork"
        )


def check_features(features: Tensor, layer: nn.Linear) -> None:
    if features.shape[1] != layer.in_features:
        raise ValueError(
            f"the network's features have {features.shape[1]} numbers, but the policy takes {layer.in_features}; "
            f"build it with feature_dim={features.shape[1]}, or name another layer with features="
        )


# -- policies by name, in recipes and in policy files ------------------------------------------------------------------

KINDS: dict[str, type[Policy]] = {
    "policy-network": PolicyNetwork,
    "feature-policy": FeaturePolicy,
    "clue-policy": CluePolicy,
    "label-policy": LabelPolicy,
}
# Prefixes of a kind's name.
HEADS: dict[str, Head] = {"": torch.sigmoid, "exponential-": exponential}
WRAPPERS: dict[str, Callable[..., nn.Module]] = {"rejecting-": RejectingPolicy, "regressing-": RegressingPolicy}
POLICIES = {
    wrapper + head + kind: (wrapper, head, kind)
    for wrapper in ("", *WRAPPERS) for head in HEADS for kind in KINDS
    if wrapper != "regressing-" or head  # a prediction must not be bounded
}  # fmt: skip


def build(
    name: str, feature_dim: int, hidden: int = 100, num_classes: int | None = None, sharpness: float = 1.0
) -> nn.Module:
    """A policy by its name in `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    wrapper, head, kind = POLICIES[name]
    if kind == "label-policy" and num_classes is None:
        raise ValueError(f"{name} looks at labels; say with num_classes= how many classes there are")
    classes = {"num_classes": num_classes} if kind == "label-policy" else {}
    policy = KINDS[kind](feature_dim, hidden, HEADS[head], **classes)
    sharp = {"sharpness": sharpness} if wrapper == "regressing-" else {}
    return WRAPPERS[wrapper](policy, **sharp) if wrapper else policy


def name_of(policy: nn.Module) -> str | None:
    """A policy's name in `POLICIES`; None if it has none."""
    for prefix, wrapper in WRAPPERS.items():
        if type(policy) is wrapper:
            inner = name_of(policy.policy)  # type: ignore[arg-type]
            return None if inner is None or (name := prefix + inner) not in POLICIES else name
    kinds = [name for name, kind in KINDS.items() if type(policy) is kind]
    heads = [name for name, head in HEADS.items() if getattr(policy, "head", None) is head]
    return heads[0] + kinds[0] if kinds and heads else None


def innermost(policy: nn.Module) -> nn.Module:
    """The policy inside all those `Around` it."""
    return innermost(policy.policy) if isinstance(policy, Around) else policy
