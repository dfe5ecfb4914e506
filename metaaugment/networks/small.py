"""A small convolutional network, for images that a laptop trains on."""

from itertools import pairwise

from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three convolutions with batch normalisation, the mean over positions, one linear layer."""

    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        widths = (channels, 32, 64, 128)
        self.body = nn.Sequential(
            *(
                layer
                for inputs, outputs in pairwise(widths)
                for layer in (
                    nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                )
            )
        )
        self.output = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.output(self.body(images).mean((2, 3)))
