"""The program `metaaugment`: one typed function a command; each hands over to the part that does the work."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro
from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, arg

import metaaugment
from metaaugment.distributed import Parted, rank
from metaaugment.training import launch
from metaaugment.training.faults import full_memory, lost_reader
from metaaugment.training.interruption import Interrupted

if TYPE_CHECKING:
    from metaaugment.search.search import Kind


def option(help: str, default: str | None = None, metavar: str | None = None) -> object:
    """An optional flag: what it is, and in words what happens without it."""
    return arg(help=help, metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


# What the benches share.
Seconds = Annotated[float, arg(help="Time for each kind of step.")]
Device = Annotated[str | None, option("cpu or cuda.", "cuda where there is one", "NAME")]
Figures = Annotated[Path | None, option("Also write the figures to FILE, as JSON.", metavar="FILE")]


def check_bench(batch: int, seconds: float) -> None:
    if batch < 2 or not 0 < seconds < 3600:
        raise ValueError(f"--batch is {batch} and --seconds {seconds:g}; they must be at least 2, and 0 to 3600")


def ops(
    space: Annotated[str | None, option("Whose meaning of a magnitude.", "metaaugment", "NAME")] = None,
    size: Annotated[int, arg(help="Side of the image in pixels, which translations are relative to.")] = 32,
    picture: Annotated[Path | None, option("Draw each function at five magnitudes into FILE.", metavar="FILE")] = None,
    image: Annotated[Path | None, option("What to draw.", "a photo from scikit-learn", "FILE")] = None,
    policy: Annotated[str | None, option("Say what a published or found policy does.", metavar="NAME")] = None,
) -> None:
    """List the image functions, and what each magnitude from 0 to 10 means to them; or what a policy does with them.

    Where the output is no terminal: their names, one a line; with --space the table, columns parted by tabs.
    """
    from metaaugment.report import operations
    from metaaugment.transformation import MAX_SIDE

    if not 1 <= size <= MAX_SIDE:
        raise ValueError(f"--size is {size}; it must be 1 to {MAX_SIDE}")
    if image is not None and picture is None:
        raise ValueError(f"--image {image} is only used with --picture FILE; name a file to draw it into")
    if policy is not None:
        from metaaugment.report.policies import in_words

        if space is not None or picture is not None:
            raise ValueError(f"--policy {policy} has a space of its own and no picture; leave the other flags away")
        for line in in_words(policy, size):
            print(line)
    elif picture is not None:
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
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time two functions an image, ours beside Pillow, torchvision, timm and kornia, all in one run."""
    from metaaugment.bench import ops

    if not 0 < seconds < 3600:
        raise ValueError(f"--seconds is {seconds:g}; it must be above 0, and less than an hour")
    ops.run(seconds, device, out)


def bench_step(
    networks: Annotated[tuple[str, ...], arg(help="Names of task networks.", metavar="NAMES")] = (),
    batch: Annotated[int, arg(help="Images in a mini-batch, and in a validation batch.")] = 128,
    seconds: Seconds = 3.0,
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time a plain training step and joint steps by each route, all in one run."""
    from metaaugment.bench import step

    check_bench(batch, seconds)
    step.run(networks, batch, seconds, device, out)


def bench_transfer(
    batch: Annotated[int, arg(help="Images in a mini-batch.")] = 128,
    seconds: Seconds = 3.0,
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time a training step under a learned policy, and under its distribution alone, beside a plain one."""
    from metaaugment.bench import transfer

    check_bench(batch, seconds)
    transfer.run(batch, seconds, device, out)


def recipes() -> None:
    """List the recipes: every row of the paper's tables, and two for data of your own."""
    from rich.table import Table

    from metaaugment.experiments.paper import RECIPES

    if not Console().is_terminal:
        print("\n".join(RECIPES))
        return
    table = Table("recipe", "what it is", box=None, pad_edge=False, show_header=False)
    for name, function in RECIPES.items():
        table.add_row(name, (function.__doc__ or "").split("\n")[0])
    Console().print(table)


class Patient(Console):
    """Goes on without output when whoever reads it has seen enough, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def export(
    run: Annotated[Path, Positional, arg(help="Folder of a run.", metavar="RUN")],
    file: Annotated[Path, Positional, arg(help="Where the policy goes.", metavar="FILE")],
    half: Annotated[bool, arg(help="Half the size, in float16.")] = False,
    sampler_only: Annotated[bool, arg(help="The distribution over transformations alone, without networks.")] = False,
) -> None:
    """Write the policy that a run has learned as one file."""
    from metaaugment.experiments.export import learned_policy

    if file.exists():
        raise ValueError(f"{file} exists already; choose another name, or remove it")
    policy = learned_policy(run)
    (policy.sampler_only() if sampler_only else policy).save(file, half)
    print(file)


def inspect(file: Annotated[Path, Positional, arg(help="A policy file.", metavar="FILE")]) -> None:
    """Say what is in a policy file."""
    from metaaugment.baselines.published import system_of
    from metaaugment.transfer import LearnedPolicy

    if system := system_of(file):
        raise ValueError(f"{file} is a policy of {system}; metaaugment ops --policy {file} says what it does")
    print("\n".join(LearnedPolicy.load(file).describe()))


def show(
    file: Annotated[Path, Positional, arg(help="A policy file.", metavar="FILE")],
    images: Annotated[tuple[Path, ...], Positional, arg(help="Pictures to augment.", metavar="IMAGE")],
    out: Annotated[Path, arg(help="Where the picture goes.", metavar="FILE")] = Path("grid.png"),
    copies: Annotated[int, arg(help="Augmented copies of each.")] = 8,
    seed: Annotated[int, arg(help="Of what is drawn.")] = 0,
) -> None:
    """Draw augmented copies of images with the weights that a policy gives them."""
    import torch

    from metaaugment.data import CorruptImage, ImageFiles
    from metaaugment.report import figures
    from metaaugment.transfer import LearnedPolicy

    if not images:
        raise ValueError("no image is named; give one or more behind the policy file")
    if not 1 <= copies <= 50:
        raise ValueError(f"--copies is {copies}; it must be 1 to 50")
    if not out.suffix or out.is_dir():
        raise ValueError(f"--out {out} is no name for a picture; give it an ending such as .png")
    if out.exists():
        raise ValueError(f"--out {out} exists already; choose another name, or remove it")
    policy = LearnedPolicy.load(file)
    if policy.needs_labels:
        raise ValueError(
            f"{file} looks at labels, which pictures do not have; show its distribution alone: make a file of that "
            "with metaaugment export RUN FILE --sampler-only, or in Python with policy.sampler_only()"
        )
    names = tuple(str(image.absolute()) for image in images)
    files = ImageFiles(Path("/"), names, torch.zeros(len(names), dtype=torch.long), policy.source.size[0])
    try:
        pictures = torch.stack([files.image(place) for place in range(len(names))])
    except CorruptImage as error:
        raise ValueError(str(error).split(";")[0] + "; leave it out") from None
    pictures = pictures if policy.source.channels == 3 else pictures.float().mean(1, keepdim=True).to(torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    print(figures.save(figures.copies(pictures, policy, copies, generator), out))


def transfer(
    file: Annotated[Path, Positional, arg(help="A policy file.", metavar="FILE")],
    recipe: Annotated[str, Positional, arg(help="What to train under it.", metavar="RECIPE")],
) -> None:
    """Train a recipe under a learned policy: the same as train RECIPE --policy FILE, with the same flags."""
    raise AssertionError("rewritten before it is parsed")


def data(
    words: Annotated[
        tuple[str, ...], Positional, arg(metavar="[get NAME]", help="What to fetch; all sets are listed without.")
    ] = (),
    data: Annotated[
        Path | None, option("Folder of the data.", "$METAAUGMENT_DATA or ~/.cache/metaaugment", "DIR")
    ] = None,
) -> None:
    """Say which data sets are there, where each is looked for, and how to get it; or fetch one."""
    from metaaugment.data.download import get
    from metaaugment.data.status import status

    if words and (words[0] != "get" or len(words) != 2):
        raise ValueError(f"metaaugment data {' '.join(words)} is no command; say metaaugment data, or data get NAME")
    if words:
        with fetching() as progress:
            sentence = get(words[1], data, progress)
        print(sentence)
        return
    if not Console().is_terminal:
        print("\n".join(f"{one.name}\t{one.state}\t{one.where}\t{one.how}".rstrip() for one in status(data)))
        return
    for one in status(data):
        Console().print(f"[bold]{one.name}[/bold]  {one.state}  {one.where}", highlight=False, soft_wrap=True)
        if one.how:
            Console().print(f"    {one.how}", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def fetching() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for what is fetched, on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield progress


def trainer_of(name: str, args: Sequence[str]) -> Callable[..., None]:
    """The command that trains a recipe: its fields, and where it runs, as flags."""
    from metaaugment.experiments.flags import said
    from metaaugment.experiments.paper import RECIPES
    from metaaugment.experiments.place import Place
    from metaaugment.experiments.recipe import Recipe

    def train(
        recipe: Annotated[Recipe, OmitArgPrefixes],
        place: Annotated[Place, OmitArgPrefixes],
    ) -> None:
        from metaaugment.experiments import run

        run.train(recipe, place, Patient(soft_wrap=True, quiet=rank() > 0), said(args))

    train.__doc__ = RECIPES[name].__doc__
    train.__defaults__ = (RECIPES[name](), Place())
    return train


def reproduce(
    names: Annotated[tuple[str, ...], Positional, arg(help="Tables, rows, comparisons.", metavar="NAME")] = (),
    seeds: Annotated[int, arg(help="Runs of each entry.")] = 5,
    budget: Annotated[str | None, option("Stop after this time: 90s, 25m, 2h; the same command goes on.")] = None,
    epochs: Annotated[int | None, option("Of all runs; kept apart where they are not the recipe's.")] = None,
    methods: Annotated[tuple[str, ...], arg(help="Entries of the rows.", help_behavior_hint="(default: all)")] = (),
    at_once: Annotated[int | None, option("Runs that share the device.", "4 on a GPU, 1 elsewhere")] = None,
    data: Annotated[Path | None, option("Folder of the data.", "that of train", "DIR")] = None,
    device: Device = None,
    runs: Annotated[Path, arg(help="Folder of the runs, which are gone on with.")] = Path("runs"),
    results: Annotated[Path, arg(help="Folder of the results, one file a run.")] = Path("results"),
    report: Annotated[Path, arg(help="What is made of the results.")] = Path("RESULTS.md"),
) -> None:
    """Run the paper's tables: what is missing, side by side, within a time; each run leaves a file.

    Without a table the report is made anew from the results there are.
    """
    from metaaugment.experiments.place import Place
    from metaaugment.experiments.reproduce import Where, reproduce
    from metaaugment.experiments.tables import find_rows

    where = Where(runs, results, Place(data=data, device=device))
    reproduce(find_rows(names), seeds, budget, epochs, methods, at_once, where, report, Patient(soft_wrap=True))


def diagnose(
    run: Annotated[Path, Positional, arg(help="The folder of a run.", metavar="RUN")],
    samples: Annotated[int | None, option("Training samples to look at, about.", "2048, or five mini-batches")] = None,
    seed: Annotated[int, arg(help="Of what is drawn.")] = 0,
    data: Annotated[Path | None, option("Folder of the data.", "that of train", "DIR")] = None,
    device: Device = None,
    picture: Annotated[Path | None, option("Also draw it.", metavar="FILE")] = None,
) -> None:
    """Say whether the policy of a run learns anything, and whether there is more to learn.

    The run's network stands still; nothing is trained. The figures go to diagnosis.json in the folder of the run, where
    `metaaugment report` finds them.
    """
    from metaaugment.experiments.diagnosis import diagnose
    from metaaugment.experiments.place import Place
    from metaaugment.experiments.run import as_it_was
    from metaaugment.report import diagnosis, figures
    from metaaugment.training import folder
    from metaaugment.training.progress import counted

    console = Patient(soft_wrap=True)
    was = as_it_was(run, Place(data=data, device=device), console)
    update = was.validation.batch if was.policy_optimizer is not None else None
    found = diagnose(was.learner, was.train, was.validation.split, samples, seed, update, counted(console))
    folder.write_json(run / folder.DIAGNOSIS, found.to_json())
    for line in diagnosis.in_words(found):
        print(line)
    if picture is not None:
        print(figures.save(diagnosis.picture(found).figure, picture))


def convergence(
    horizons: Annotated[tuple[int, ...], option("Numbers of iterations T.", "256 to 8192, doubling", "T")] = (),
    seeds: Annotated[int, arg(help="Runs of each kind.")] = 3,
    out: Annotated[Path, arg(help="Folder of the figures and the picture.", metavar="DIR")] = Path(
        "results/convergence"
    ),
) -> None:
    """Measure Theorems 1 and 2: how gradients fall with the number of iterations, on a problem of exact gradients."""
    from metaaugment.experiments.convergence import HORIZONS, study, write
    from metaaugment.report import convergence, figures

    runs = study(horizons or HORIZONS, seeds, Patient(soft_wrap=True))
    for line in convergence.in_words(runs):
        print(line)
    print(write(out / "convergence.json", runs))
    print(figures.save(convergence.figure(runs), out / "convergence.png"))


def report(
    runs: Annotated[
        tuple[Path, ...], Positional, arg(help="Folders of runs, or folders that hold some.", metavar="RUN")
    ],
    out: Annotated[Path, arg(help="The page; one that is there is replaced.", metavar="FILE")] = Path("report.html"),
    figures: Annotated[
        Path | None, option("Also write each figure, at the end, as PNG and SVG.", metavar="DIR")
    ] = None,
    watch: Annotated[bool, arg(help="Follow runs under way: the page is made anew until all are finished.")] = False,
) -> None:
    """Show what the policies of runs learned: one page that opens anywhere, without a server."""
    from metaaugment.report import page
    from metaaugment.report.watch import watch as follow

    if not runs:
        raise ValueError("no run is named; give the folder of one, such as runs/digits-metaaugment-seed0")
    page.check_out(out)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise ValueError(f"--figures {figures} is a file; name a folder")

    def write(report: page.Report, refresh: int | None = None) -> None:
        report.save(out, refresh)
        if figures is not None and refresh is None:
            report.save_figures(figures)

    if watch:
        print(f"{out} follows {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
        follow(runs, write)
    else:
        write(page.Report.of(runs))
    print(out)


def find_policy(
    system: Annotated[str, Positional, arg(help="faa, pba, dada or autoaugment.", metavar="SYSTEM")],
    recipe: Annotated[str, Positional, arg(help="Whose data and network.", metavar="RECIPE")],
) -> None:
    """Search for a policy by a compared system, on any data; it ends in a file that trains like a published one."""
    raise AssertionError("parsed as a command of its own")


def searches() -> "dict[str, Kind]":
    from metaaugment.search.kinds import SEARCHES

    return SEARCHES


def searcher_of(system: str, name: str, args: Sequence[str]) -> Callable[..., None]:
    """The command that searches for a policy of a system on a recipe's data, with its network."""
    from dataclasses import replace

    from metaaugment.experiments.flags import said
    from metaaugment.experiments.paper import RECIPES
    from metaaugment.experiments.place import Place
    from metaaugment.experiments.recipe import Recipe

    kind = searches()[system]

    def search(
        recipe: Annotated[Recipe, OmitArgPrefixes],
        settings: Annotated[kind.settings, OmitArgPrefixes],  # type: ignore[name-defined]
        place: Annotated[Place, OmitArgPrefixes],
    ) -> None:
        from metaaugment.search.search import search

        search(kind, recipe, settings, place, Patient(soft_wrap=True), said(args))

    search.__doc__ = f"{cleandoc(kind.settings.__doc__ or '')}\n\nData and network: {name}."
    search.__defaults__ = (kind.trial(replace(RECIPES[name](), method=system)), kind.settings(), Place())
    return search


def program(args: Sequence[str]) -> tyro.extras.SubcommandApp:
    bench = tyro.extras.SubcommandApp()
    bench.command(name="ops")(bench_ops)
    bench.command(name="step")(bench_step)
    bench.command(name="transfer")(bench_transfer)
    from metaaugment.experiments.paper import RECIPES

    train = tyro.extras.SubcommandApp()
    # Where a recipe is named, its flags alone: the nearest of an unknown one is looked for among all that there are.
    for name in [name for name in args[1:2] if name in RECIPES] or RECIPES:
        train.command(name=name)(trainer_of(name, args))
    search = tyro.extras.SubcommandApp()
    # Reading the searches takes a moment; they are read where one is asked for.
    for system in searches() if args[:1] == ["search"] else ():
        on = tyro.extras.SubcommandApp()
        for name in [name for name in args[2:3] if name in RECIPES] or RECIPES:
            on.command(name=name)(searcher_of(system, name, args))
        search.command(on, name=system, help=cleandoc(searches()[system].settings.__doc__ or ""))
    app = tyro.extras.SubcommandApp()
    app.command(train, name="train", help="Train a network by a recipe.")
    app.command(recipes)
    app.command(reproduce)
    app.command(report)
    app.command(diagnose)
    if args[:1] == ["search"]:
        app.command(search, name="search", help=find_policy.__doc__)
    else:
        app.command(name="search")(find_policy)
    app.command(data)
    app.command(export)
    app.command(inspect)
    app.command(show)
    app.command(transfer)
    app.command(ops)
    app.command(convergence)
    app.command(bench, name="bench", help="Time a part beside its peers.")
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Exit status 0 for success, 2 for a user's mistake (one sentence), 1 for a fault of ours.

    Of several processes that train together one speaks.
    """
    with launch.ending():
        call(list(sys.argv[1:] if args is None else args))


def call(args: Sequence[str]) -> None:
    try:
        if args[:1] in (["train"], ["transfer"]):
            launch.join()
        if args[:1] in (["search"], ["reproduce"]):
            launch.check_alone(args[0])
        if args[:1] == ["transfer"] and any(arg.split("=")[0] == "--policy" for arg in args):
            fail("transfer names its policy file first; leave --policy away")
        if args[:1] == ["transfer"] and len(args) > 2:
            args = ["train", args[2], "--policy", args[1], *args[3:]]
        program(args).cli(prog="metaaugment", description=metaaugment.__doc__, args=args, console_outputs=rank() == 0)
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        fail(str(error))
    except Parted as error:
        fail(f"{error}; go on from the last checkpoint with --resume, or have torchrun do it with --max-restarts", 1)
    except (MemoryError, RuntimeError) as error:
        fault = full_memory(error) or lost_reader(error)
        if fault is None:
            raise
        lower = "--batch, --copies or --policy-batch" if full_memory(error) else "--workers"
        fail(f"{fault}; lower {lower}; what was begun in a folder goes on with --resume")
    except Interrupted as stop:
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(sentence: str, status: int = 2) -> NoReturn:
    if launch.speaks():
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"metaaugment: {sentence}", style="red", markup=False, highlight=False)
    sys.exit(status)
