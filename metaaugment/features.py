"""The features of any network: what enters its last linear layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Seen(nn.Identity):
    """Marks its input as the features, for a network whose features are not the input of its last linear layer."""


class Features:
    """Watches a network's passes and keeps the input that one of its layers got in the last pass.

    The layer is the named one, or else the linear or `Seen` layer that is called last, which the first pass shows.
    """

    def __init__(self, network: nn.Module, layer: str | None = None) -> None:
        self.network, self.layer = network, layer
        self.layers = self._eligible()
        self._last: tuple[nn.Module, Tensor] | None = None

    def _eligible(self) -> list[nn.Module]:
        modules = dict(self.network.named_modules())
        linear = {name: module for name, module in modules.items() if isinstance(module, (nn.Linear, Seen))}
        if self.layer is not None and self.layer not in modules:
            raise ValueError(
                f"features={self.layer!r} is not a layer of the network; its linear layers are {list(linear)}"
            )
        if self.layer is None and not linear:
            raise ValueError(
                "the network has no linear layer whose input could be its features; "
                "name the layer to take them from with features="
            )
        return list(linear.values()) if self.layer is None else [modules[self.layer]]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the passes made inside."""
        if not set(self.layers) <= set(self.network.modules()):  # a head was replaced
            self.layers = self._eligible()
        self._last = None
        hooks = [module.register_forward_pre_hook(self._keep, with_kwargs=True) for module in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> Float[Tensor, "n d"]:
        """The features of the pass just watched, averaged over positions or tokens where there are any."""
        if self._last is None:
            raise ValueError(
                "the network's pass did not call the layer that the features come from; name another with features= "
                "(a pass that is compiled already cannot be watched: build the learner before the first one)"
            )
        layer, features = self._last
        self._last, self.layers = None, [layer]
        if features.ndim == 4 and not isinstance(layer, nn.Linear):
            return features.mean((2, 3))
        return features.flatten(1, -2).mean(1) if features.ndim > 2 else features

    def _keep(self, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        for value in (*inputs, *named.values()):
            if isinstance(value, torch.Tensor):
                self._last = (layer, value)
                return


def feature_dim(network: nn.Module) -> int:
    """How many numbers a feature has: the inputs of the linear layer that is defined last."""
    return next(module for module in reversed(list(network.modules())) if isinstance(module, nn.Linear)).in_features
