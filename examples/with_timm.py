"""A timm network trained under a learned policy, which takes the place of Mixup.

    python examples/with_timm.py

The policy is learned first, in a very short run, by the loop in with_torchvision.py.
"""

import timm  # type: ignore[import-not-found]
import torch
from timm.data import resolve_model_data_config  # type: ignore[import-not-found]
from timm.data.loader import PrefetchLoader, fast_collate  # type: ignore[import-not-found]
from timm.loss import SoftTargetCrossEntropy  # type: ignore[import-not-found]
from timm.optim import create_optimizer_v2  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, TensorDataset
from with_torchvision import digits, learn

from metaaugment.integrations.timm import PolicyMixup


def main() -> None:
    torch.set_num_threads(1)  # passes are so small that more threads only wait for each other
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, validation, test = digits()
    policy = learn(train, validation)

    model = timm.create_model("test_resnet", num_classes=10).to(device)
    config = resolve_model_data_config(model)
    mean, std = config["mean"], config["std"]

    def loader(data: TensorDataset, shuffle: bool) -> PrefetchLoader:
        return PrefetchLoader(DataLoader(data, 64, shuffle, collate_fn=fast_collate), mean, std, device=device)

    mixup_fn = PolicyMixup(policy, mean, std, num_classes=10, label_smoothing=0.1)
    loss_fn = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, "adamw", lr=2e-3)
    for epoch in range(3):
        model.train()
        losses = []
        for images, labels in loader(train, shuffle=True):
            images, targets = mixup_fn(images, labels)
            loss = loss_fn(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        correct = [model(images).argmax(1) == labels for images, labels in loader(test, shuffle=False)]
    print(f"test accuracy {torch.cat(correct).float().mean():.1%}")


if __name__ == "__main__":
    main()
