"""The systems that the paper compares with, each as a sampler."""
