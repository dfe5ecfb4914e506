"""The command `metaaugment`, also as `python -m metaaugment`: the form that torchrun needs."""

import sys
from importlib.util import find_spec

LABORATORY = ("jinja2", "matplotlib", "rich", "sklearn", "tyro")  # what `pip install 'metaaugment[lab]'` adds


def main() -> None:
    if missing := [name for name in LABORATORY if find_spec(name) is None]:
        what = f"{', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        print(
            f"metaaugment: the program needs {what}; install it with: pip install 'metaaugment[lab]'", file=sys.stderr
        )
        sys.exit(2)
    from metaaugment.lab.cli import main as program

    program()


if __name__ == "__main__":
    main()
