"""A user's own weights to start from."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn


def load_pretrained(net: nn.Module, file: Path) -> bool:
    """Start from a user's weights; False if their last layer is for other classes, in which case ours stays fresh."""
    with file.open("rb"):  # its OSError names the file and the reason; that of safetensors does not
        pass
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(
            f"--pretrained {file} is not a safetensors file ({error}); load the weights with torch.load, and write "
            "them with safetensors.torch.save_file"
        ) from None
    own = net.state_dict()
    head = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    fresh = [f"{head}.{part}" for part in ("weight", "bias")]
    if all(name in weights and weights[name].shape != own[name].shape for name in fresh):
        weights = {name: value for name, value in weights.items() if name not in fresh}
    else:
        fresh = []
    for name, value in own.items():
        if name in fresh or (name.endswith("num_batches_tracked") and name not in weights):
            continue
        if name not in weights or weights[name].shape != value.shape:
            found = f"{tuple(weights[name].shape)} in the file" if name in weights else "missing in the file"
            raise ValueError(
                f"--pretrained {file} does not fit: {name} is {tuple(value.shape)} in the network and {found}; "
                "name the network that the file was made with by --network"
            )
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(f"--pretrained {file} has {unknown[0]}, which the network lacks; choose another --network")
    net.load_state_dict(weights, strict=False)
    return not fresh
