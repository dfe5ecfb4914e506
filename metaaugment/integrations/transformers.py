"""A learned policy in Hugging Face's Trainer, as a mixin; nothing is imported from transformers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from metaaugment.distributed import world_size
from metaaugment.integrations.normalization import NormalizedPolicy
from metaaugment.learned.policy import LearnedPolicy

if TYPE_CHECKING:
    from transformers.trainer import Trainer  # type: ignore[import-not-found]
else:
    Trainer = object


class Transfer(Trainer):
    """Makes a Trainer augment `pixel_values` by a learned policy, and minimise Σ V_i L_i.

        class PolicyTrainer(Transfer, Trainer): ...

        trainer = PolicyTrainer(model, arguments, policy=policy, processing_class=image_processor, train_dataset=…)

    For image classification with class numbers as labels. `pixel_values` are normalised, as an image processor
    returns them; they are converted back to pixels for the policy. Losses are cross-entropies, with the arguments'
    `label_smoothing_factor`. Evaluation is the Trainer's own.

    Args:
        policy: the learned policy.
        mean, std: of `pixel_values`; by default those of the image processor, passed as `processing_class`.
    """

    def __init__(
        self,
        *args: Any,
        policy: LearnedPolicy,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None:
            raise ValueError(
                "the policy weights one loss per sample, but compute_loss_func returns a single loss; leave it out"
            )
        # The Trainer then takes each loss as its batch's mean, and divides it by the number of accumulated batches.
        self.model_accepts_loss_kwargs = False
        processor = getattr(self, "processing_class", None)
        mean = getattr(processor, "image_mean", None) if mean is None else mean
        std = getattr(processor, "image_std", None) if std is None else std
        if mean is None or std is None:
            raise ValueError("the mean and std of pixel_values are not known; give them, or an image processor")
        self.policy = NormalizedPolicy(policy, mean, std)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels, others = self._labels(inputs), {key: value for key, value in inputs.items() if key != "labels"}
        others["pixel_values"], weights = self.policy.augment(inputs["pixel_values"], labels)
        outputs = model(**others)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        smoothing = self.args.label_smoothing_factor
        losses = F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)
        loss = (weights * losses).sum() * world_size()  # a sum over the processes, which average it
        return (loss, outputs) if return_outputs else loss

    def _labels(self, inputs: dict[str, Any]) -> Tensor:
        if missing := [key for key in ("pixel_values", "labels") if key not in inputs]:
            raise ValueError(f"a training batch has no {missing[0]!r}, only {', '.join(inputs)}; the policy needs it")
        labels = inputs["labels"]
        if labels.ndim != 1 or labels.is_floating_point():
            raise ValueError(
                f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; the policy takes class numbers [n]"
            )
        return labels
