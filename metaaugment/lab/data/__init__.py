"""Data sets: reading them, splitting them, fetching them."""

from metaaugment.lab.data.catalog import DATASETS, Status, dataset, status
from metaaugment.lab.data.data_set import DataSet
from metaaugment.lab.data.download import get
from metaaugment.lab.data.files import CorruptImage, ImageFiles
from metaaugment.lab.data.images import Images

__all__ = ["DATASETS", "CorruptImage", "DataSet", "ImageFiles", "Images", "Status", "dataset", "get", "status"]
