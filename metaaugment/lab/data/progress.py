"""How a long piece of work reports its progress."""

from collections.abc import Callable

# What is under way, how much of it is done, and how much there is (None: not known).
Progress = Callable[[str, int, int | None], None]


def silent(what: str, done: int, total: int | None) -> None:
    """Report nothing."""
