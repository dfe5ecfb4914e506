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
        modules = dict(network.named_modules())
        if layer is not None and layer not in modules:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            raise ValueError(f"features={layer!r} is not a layer of the network; its linear layers are {linear}")
        self.layers = (
            [modules[layer]] if layer is not None else [m for m in modules.values() if isinstance(m, (nn.Linear, Seen))]
        )
        if not self.layers:
            raise ValueError(
                "the network has no linear layer whose input could be its features; "
                "name the layer to take them from with features="
            )
        self._last: tuple[nn.Module, Tensor] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the passes made inside."""
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
