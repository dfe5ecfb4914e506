"""A Hugging Face network trained under a learned policy by the Trainer.

    python examples/with_transformers.py

The policy is learned first, in a very short run, by the loop in with_torchvision.py.
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset
from transformers import (  # type: ignore[import-not-found]
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
)
from with_torchvision import SIZE, digits, learn

from metaaugment.integrations.transformers import Transfer


class PolicyTrainer(Transfer, Trainer): ...


class Processed(Dataset[dict[str, Any]]):
    """Images as an image processor returns them."""

    def __init__(self, data: TensorDataset, processor: ViTImageProcessor) -> None:
        images, self.labels = data.tensors
        self.pixels = processor(list(images), return_tensors="pt")["pixel_values"]

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
    sizes: Any = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=64,
            learning_rate=0.01,
            label_smoothing_factor=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = PolicyTrainer(
            model,
            arguments,
            policy=policy,
            processing_class=processor,
            train_dataset=Processed(train, processor),
            compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()},
        )
        trainer.train()
        measured = trainer.evaluate(Processed(test, processor))
    print(f"test accuracy {measured['eval_accuracy']:.1%}")


if __name__ == "__main__":
    main()
