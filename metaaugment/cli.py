"""The program `metaaugment`: one typed function a command; each hands over to the part that does the work."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import tyro
from rich.console import Console
from tyro.conf import arg

import metaaugment


def option(help: str, default: str | None = None, metavar: str | None = None) -> object:
    """An optional flag: what it is, and in words what happens without it."""
    return arg(help=help, metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


def ops(
    space: Annotated[str | None, option("Whose meaning of a magnitude.", "metaaugment", "NAME")] = None,
    size: Annotated[int, arg(help="Side of the image in pixels, which translations are relative to.")] = 32,
    picture: Annotated[Path | None, option("Draw each function at five magnitudes into FILE.", metavar="FILE")] = None,
    image: Annotated[Path | None, option("What to draw.", "a photo from scikit-learn", "FILE")] = None,
) -> None:
    """List the image functions, and what each magnitude from 0 to 10 means to them.

    Where the output is no terminal: their names, one a line; with --space the table, columns parted by tabs.
    """
    from metaaugment.report import operations
    from metaaugment.transformation import MAX_SIDE

    if not 1 <= size <= MAX_SIDE:
        raise ValueError(f"--size is {size}; it must be 1 to {MAX_SIDE}")
    if image is not None and picture is None:
        raise ValueError(f"--image {image} is only used with --picture FILE; name a file to draw it into")
    if picture is not None:
        operations.draw(picture, image, space or "metaaugment")
        print(picture)
    elif sys.stdout is not None and sys.stdout.isatty():
        operations.print_table(space or "metaaugment", size)
    elif space is not None:
        print("\n".join("\t".join(row) for row in operations.level_rows(space, size)))
    else:
        print("\n".join(row[0] for row in operations.level_rows("metaaugment", size)[1:]))


def bench_ops(
    seconds: Annotated[float, arg(help="Time for each system and size.")] = 2.0,
    device: Annotated[str | None, option("cpu or cuda.", "cuda where there is one", "NAME")] = None,
    out: Annotated[Path | None, option("Also write the figures to FILE, as JSON.", metavar="FILE")] = None,
) -> None:
    """Time two functions an image, ours beside Pillow, torchvision, timm and kornia, all in one run."""
    from metaaugment.bench import ops

    if not 0 < seconds < 3600:
        raise ValueError(f"--seconds is {seconds:g}; it must be above 0, and less than an hour")
    ops.run(seconds, device, out)


def bench_step(
    networks: Annotated[tuple[str, ...], arg(help="Names of task networks.", metavar="NAMES")] = (),
    batch: Annotated[int, arg(help="Images in a mini-batch, and in a validation batch.")] = 128,
    seconds: Annotated[float, arg(help="Time for each kind of step.")] = 3.0,
    device: Annotated[str | None, option("cpu or cuda.", "cuda where there is one", "NAME")] = None,
    out: Annotated[Path | None, option("Also write the figures to FILE, as JSON.", metavar="FILE")] = None,
) -> None:
    """Time a plain training step and joint steps by each route, all in one run."""
    from metaaugment.bench import step

    if batch < 2 or not 0 < seconds < 3600:
        raise ValueError(f"--batch is {batch} and --seconds {seconds:g}; they must be at least 2, and 0 to 3600")
    step.run(networks, batch, seconds, device, out)


def program() -> tyro.extras.SubcommandApp:
    bench = tyro.extras.SubcommandApp()
    bench.command(name="ops")(bench_ops)
    bench.command(name="step")(bench_step)
    app = tyro.extras.SubcommandApp()
    app.command(ops)
    app.command(bench, name="bench", help="Time a part beside its peers.")
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Exit status 0 for success, 2 for a user's mistake (one sentence), 1 for a fault of ours."""
    try:
        program().cli(prog="metaaugment", description=metaaugment.__doc__, args=args)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        fail(str(error))


def fail(sentence: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(f"metaaugment: {sentence}", style="red", markup=False, highlight=False)
    sys.exit(2)
