"""Data sets: reading them, splitting them, fetching them."""

from metaaugment.data.dataset import DATASETS, DataSet, dataset
from metaaugment.data.download import get
from metaaugment.data.files import CorruptImage, ImageFiles
from metaaugment.data.images import Images
from metaaugment.data.status import Status, status

__all__ = ["DATASETS", "CorruptImage", "DataSet", "ImageFiles", "Images", "Status", "dataset", "get", "status"]
