"""A learned policy, and joint training, in the loops of other libraries: torchvision, timm, Lightning, Hugging Face."""
