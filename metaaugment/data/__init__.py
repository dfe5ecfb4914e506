"""Data sets: reading them, splitting them, fetching them."""

from metaaugment.data.catalog import DATASETS, dataset
from metaaugment.data.data_set import DataSet
from metaaugment.data.download import get
from metaaugment.data.files import CorruptImage, ImageFiles
from metaaugment.data.images import Images
from metaaugment.data.presence import Status, status

__all__ = ["DATASETS", "CorruptImage", "DataSet", "ImageFiles", "Images", "Status", "dataset", "get", "status"]
