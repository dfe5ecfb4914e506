"""The searches there are, by the name of their system."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from metaaugment.lab.search import auto_augment, dada, faa, pba, search
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


def recorded(system: str, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What a search on a recipe records when it begins, if these fields of the trial and the settings are changed."""
    kind = SEARCHES[system]
    own = {field.name for field in fields(kind.settings)}  # no recipe has a field of this name
    trial = replace(kind.default(name), **{field: value for field, value in changes.items() if field not in own})
    settings = kind.settings(**{field: value for field, value in changes.items() if field in own})
    return search.recorded(kind, trial, settings)
