"""The searches there are, by the name of their system."""

from metaaugment.lab.search import auto_augment, dada, faa, pba
from metaaugment.lab.search.search import Kind

SEARCHES: dict[str, Kind] = {
    kind.system: kind
    for kind in (
        Kind(
            "faa", faa.Settings, faa.find, faa.trial, faa.work, ("processes", "storage"), faa.ROW,
            "shares its trials among processes with --processes N, and among machines with --storage URL",
        ),
        Kind("pba", pba.Settings, pba.find, pba.trial, pba.work, ("processes", "ray_workers", "address"), pba.ROW),
        Kind(
            "dada", dada.Settings, dada.find, dada.trial, dada.work, row=dada.ROW,
            spread="is a single training run, on one device",
        ),
        Kind(
            "autoaugment", auto_augment.Settings, auto_augment.find, auto_augment.trial, row=auto_augment.ROW,
            spread="trains its networks one after the other, on one device, as each depends on those before it",
        ),
    )
}  # fmt: skip
