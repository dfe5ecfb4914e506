"""A network of Hugging Face trained under a learned policy by its Trainer.

    python examples/with_transformers.py
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (  # type: ignore[import-not-found]
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
)
from with_torchvision import SIZE, digits, learn

from metaaugment.data import Images
from metaaugment.integrations.transformers import Transfer


class PolicyTrainer(Transfer, Trainer): ...


class Processed(Dataset[dict[str, Any]]):
    """Images as the image processor of a checkpoint gives them."""

    def __init__(self, images: Images, processor: ViTImageProcessor) -> None:
        self.pixels = processor(list(images.images), return_tensors="pt")["pixel_values"]
        self.labels = images.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[i], "labels": self.labels[i]}


def main() -> None:
    torch.set_num_threads(1)  # passes are so small that more threads only wait for each other
    torch.manual_seed(0)
    train, validation, test = digits()
    policy = learn(train, validation)

    processor = ViTImageProcessor(size={"height": SIZE, "width": SIZE})
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=4, per_device_train_batch_size=64, learning_rate=1e-2, save_strategy="no",
            report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = PolicyTrainer(
            ResNetForImageClassification(config),
            arguments,
            policy=policy,
            processing_class=processor,
            train_dataset=Processed(train, processor),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        )
        trainer.train()
        print(f"test accuracy {trainer.evaluate(Processed(test, processor))['eval_accuracy']:.1%}")


if __name__ == "__main__":
    main()
