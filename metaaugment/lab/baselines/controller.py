"""The controller of AutoAugment and Adversarial AutoAugment: an LSTM that decides on a policy, taught by REINFORCE."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Adam

from metaaugment.ops import OPS

# AutoAugment's functions in the order of our table, except its sixteenth, Sample Pairing, which takes a second image.
# Identity is not one of them.
FUNCTIONS: tuple[str, ...] = tuple(op.name for op in OPS if op.name != "Identity")
PROBABILITIES = 11  # 0, 0.1, ..., 1
LEVELS = 10  # 0, 1, ..., 9
MAX_LEVEL = 10
SUB_POLICIES = 5  # of a policy, each of two functions

HIDDEN = 100
RATE = 3.5e-4
ENTROPY = 1e-5


class Controller(nn.Module):
    """One-layer LSTM that makes a sequence of decisions, each given those before it.

    Args:
        kinds: how many choices each kind of decision has, in the order of the decisions.
        repeats: how often this order is repeated; a sequence has `len(kinds) * repeats` decisions.
        generator: draws the initial weights, U(-0.1, 0.1) as in AutoAugment.
    """

    places: Tensor
    allowed: Tensor

    def __init__(
        self, kinds: Sequence[int], repeats: int, generator: torch.Generator | None = None, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        # All kinds share one table of choices, each with its own range; the token that begins a sequence comes last.
        choices = sum(kinds)
        begins = torch.tensor([sum(kinds[:kind]) for kind in range(len(kinds))] * repeats)
        ends = begins + torch.tensor(list(kinds) * repeats)
        table = torch.arange(choices)
        allowed = (table >= begins[:, None]) & (table < ends[:, None])
        self.register_buffer("places", begins, persistent=False)  # [length]
        self.register_buffer("allowed", allowed, persistent=False)  # [length, choices]
        with torch.random.fork_rng(devices=[]):  # their default weights are discarded, and leave no trace
            self.embedding = nn.Embedding(choices + 1, hidden)
            self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
            self.head = nn.Linear(hidden, choices)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.1, 0.1, generator)

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator | None = None) -> Int[Tensor, "count length"]:
        token, state, decisions = torch.full((count,), self._beginning), None, []
        for place, allowed in zip(self.places, self.allowed, strict=True):
            output, state = self.lstm(self.embedding(token)[:, None], state)
            probabilities = self._log_softmax(output[:, 0], allowed).exp()
            token = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            decisions.append(token - place)
        return torch.stack(decisions, 1)

    def log_probability(self, decisions: Int[Tensor, "n length"]) -> Float[Tensor, " n"]:
        """The log-probability of whole sequences."""
        tokens = decisions + self.places
        return self._log_probabilities(tokens).gather(2, tokens[:, :, None]).sum((1, 2))

    def entropy(self, decisions: Int[Tensor, "n length"]) -> Float[Tensor, " n"]:
        """Summed over the decisions, each given those before it; its expectation is the entropy of whole sequences."""
        logs = self._log_probabilities(decisions + self.places)
        return -(logs.exp() * logs.masked_fill(~self.allowed, 0.0)).sum((1, 2))

    @property
    def most_entropy(self) -> float:
        """That of sequences that are all equally likely."""
        return float(self.allowed.sum(1).double().log().sum())

    def _log_probabilities(self, tokens: Int[Tensor, "n length"]) -> Float[Tensor, "n length choices"]:
        """The log-probability of each choice at each place, given the decisions before it."""
        before = torch.cat([torch.full_like(tokens[:, :1], self._beginning), tokens[:, :-1]], 1)
        return self._log_softmax(self.lstm(self.embedding(before))[0], self.allowed)

    def _log_softmax(self, outputs: Tensor, allowed: Tensor) -> Tensor:
        return self.head(outputs).masked_fill(~allowed, -torch.inf).log_softmax(-1)

    @property
    def _beginning(self) -> int:
        return self.head.out_features


def expected_reward(
    controller: Controller, decisions: Int[Tensor, "n length"], advantages: Float[Tensor, " n"], entropy: float
) -> Tensor:
    """A number whose gradient is REINFORCE's estimate of the gradient of the expected reward.

    `advantages`: rewards of the controller's own decisions, minus what was expected. `entropy`: weight of the entropy
    bonus.
    """
    return (advantages * controller.log_probability(decisions) + entropy * controller.entropy(decisions)).mean()


class Reinforce:
    """Adam steps that make decisions of high reward more likely."""

    def __init__(self, controller: Controller, rate: float = RATE) -> None:
        self.controller = controller
        self.optimizer = Adam(controller.parameters(), rate)

    @torch.enable_grad()
    def step(self, decisions: Int[Tensor, "n length"], advantages: Float[Tensor, " n"]) -> None:
        self.optimizer.zero_grad()
        (-expected_reward(self.controller, decisions, advantages.float(), ENTROPY)).backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"controller": self.controller.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.controller.load_state_dict(state["controller"])
        entries = {int(key): value for key, value in state["optimizer"].items()}  # files have strings as keys
        self.optimizer.load_state_dict({"state": entries, "param_groups": self.optimizer.state_dict()["param_groups"]})
