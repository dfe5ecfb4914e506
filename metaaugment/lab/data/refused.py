"""Arguments that are refused, by the names that they have in Python."""


class Refused(ValueError):
    """A refused argument, its value, and what is allowed; a program may name its own flag instead."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.name, self.value, self.allowed = name, value, allowed

    def __str__(self) -> str:
        return f"{self.name} is {self.value}; {self.allowed}"
