"""The searches there are, by the name of their system."""

from metaaugment.search.search import Kind

SEARCHES: dict[str, Kind] = {}
