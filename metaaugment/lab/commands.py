"""The commands: a typed function each, whose docstring is its help. Each hands over to the part that does the work.

They import what they need when they are called, so that help and mistakes are there at once.
"""

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, arg

from metaaugment.distributed import rank
from metaaugment.lab.experiments.flags import refuse, said
from metaaugment.lab.program import Patient, fetching, on_terminal

if TYPE_CHECKING:
    from metaaugment.lab.search.run import Kind
    from metaaugment.learned.policy import LearnedPolicy


def option(help: str, default: str | None = None, metavar: str | None = None) -> object:
    """An optional flag: what it is, and its default in words."""
    return arg(help=help, metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


# What the benches share.
Seconds = Annotated[float, arg(help="Seconds for each kind of step.")]
Device = Annotated[str | None, option("cpu or cuda.", "cuda if available", "NAME")]
Figures = Annotated[Path | None, option("Also write the figures to FILE, as JSON.", metavar="FILE")]


def check_bench(seconds: float, batch: int = 2) -> None:
    if not 0 < seconds <= 3600:
        raise ValueError(f"--seconds is {seconds:g}; it must be above 0 and at most 3600")
    refuse("batch", batch, batch >= 2, "at least 2")


def ops(
    space: Annotated[str | None, option("Space that defines what a magnitude means.", "metaaugment", "NAME")] = None,
    size: Annotated[int, arg(help="Side of the image in pixels; translations scale with it.")] = 32,
    picture: Annotated[Path | None, option("Draw each function at five magnitudes into FILE.", metavar="FILE")] = None,
    image: Annotated[Path | None, option("Photo to apply them to.", "one from scikit-learn", "FILE")] = None,
    policy: Annotated[str | None, option("Describe what a published or found policy does.", metavar="NAME")] = None,
) -> None:
    """List the image functions and what magnitudes from 0 to 10 mean for each; or say what a policy does with them.

    When not on a terminal: names, one per line; with --space, a tab-separated table.
    """
    from metaaugment.lab.report import operations
    from metaaugment.transformation import MAX_SIDE

    refuse("size", size, 1 <= size <= MAX_SIDE, f"1 to {MAX_SIDE}")
    if image is not None and picture is None:
        raise ValueError(f"--image {image} is only used with --picture FILE; name a file to draw it into")
    if policy is not None:
        from metaaugment.lab.report.policies import in_words

        if space is not None or picture is not None:
            raise ValueError(f"--policy {policy} cannot be combined with --space or --picture; leave those out")
        for line in in_words(policy, size):
            print(line)
    elif picture is not None:
        from metaaugment.lab.report.picture import check

        check(picture, "--picture")
        operations.draw(picture, image, space or "metaaugment")
        print(picture)
    elif on_terminal():
        operations.print_table(space or "metaaugment", size)
    elif space is not None:
        print("\n".join("\t".join(row) for row in operations.level_rows(space, size)))
    else:
        print("\n".join(row[0] for row in operations.level_rows("metaaugment", size)[1:]))


def bench_ops(
    seconds: Annotated[float, arg(help="Seconds for each system and size.")] = 2.0,
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time two functions per image, ours beside Pillow, torchvision, timm and kornia, all in one run."""
    from metaaugment.lab.bench import ops

    check_bench(seconds)
    ops.run(seconds, device, out)


def bench_step(
    networks: Annotated[
        tuple[str, ...], option("Names of task networks.", "wrn-40-2 and wrn-28-10 on a GPU, else small-cnn", "NAMES")
    ] = (),
    batch: Annotated[int, arg(help="Images in a mini-batch, and in a validation batch.")] = 128,
    seconds: Seconds = 3.0,
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time a plain training step and joint steps by each route, all in one run."""
    from metaaugment.lab.bench import step

    check_bench(seconds, batch)
    step.run(networks, batch, seconds, device, out)


def bench_transfer(
    batch: Annotated[int, arg(help="Images in a mini-batch.")] = 128,
    seconds: Seconds = 3.0,
    device: Device = None,
    out: Figures = None,
) -> None:
    """Time a training step under a learned policy, and under its distribution alone, beside a plain one."""
    from metaaugment.lab.bench import transfer

    check_bench(seconds, batch)
    transfer.run(batch, seconds, device, out)


def recipes() -> None:
    """List the recipes: every row of the paper's tables, faster ones of ours, digits, and folder."""
    from metaaugment.lab.experiments.paper import RECIPES

    listed(RECIPES)


def listed(functions: Mapping[str, object]) -> None:
    """Print names, one per line; on a terminal, each with the first line on what it is."""
    from rich.table import Table

    if not on_terminal():
        print("\n".join(functions))
        return
    table = Table("name", "what it is", box=None, pad_edge=False, show_header=False)
    for name, function in functions.items():
        table.add_row(name, (function.__doc__ or "").split("\n")[0])
    Console().print(table)


def export(
    run: Annotated[Path, Positional, arg(help="Folder of a run.", metavar="RUN")],
    file: Annotated[Path, Positional, arg(help="File to write to.", metavar="FILE")],
    half: Annotated[bool, arg(help="Write float16, half the size.")] = False,
    sampler_only: Annotated[bool, arg(help="Write only the distribution over transformations.")] = False,
    network: Annotated[bool, arg(help="Write the trained network instead, of a run by any method.")] = False,
) -> None:
    """Write the policy that a run has learned to a file, or its network."""
    from metaaugment.lab.experiments.export import learned_policy, save_network

    if file.exists():
        raise ValueError(f"{file} exists already; choose another name, or remove it")
    if network and sampler_only:
        raise ValueError("--sampler-only is of a policy, but --network writes the network; leave out one of the two")
    if network:
        save_network(run, file, half)
    else:
        policy = learned_policy(run)
        (policy.sampler_only() if sampler_only else policy).save(file, half)
    print(file)


def inspect(
    file: Annotated[Path, Positional, arg(help="A policy file, or an exported network.", metavar="FILE")],
) -> None:
    """Say what is in a policy file, or in that of an exported network."""
    from metaaugment.lab.experiments.export import about_network
    from metaaugment.lab.report.policies import learned_in_words, network_in_words

    network = about_network(file)
    print("\n".join(learned_in_words(learned(file)) if network is None else network_in_words(network)))


def learned(file: Path) -> "LearnedPolicy":
    """The learned policy in a file; refuses those of other systems, which are files of another kind."""
    from metaaugment.lab.baselines.published import system_of
    from metaaugment.learned.policy import LearnedPolicy

    if system := system_of(file):
        command = f"metaaugment ops --policy {shlex.quote(str(file))}"
        raise ValueError(f"{file} is a policy of {system}; {command} says what it does")
    return LearnedPolicy.load(file)


def show(
    file: Annotated[Path, Positional, arg(help="A policy file.", metavar="FILE")],
    images: Annotated[
        tuple[Path, ...], Positional, arg(help="Pictures to augment.", metavar="IMAGE", help_behavior_hint="(required)")
    ],
    out: Annotated[Path | None, option("File to draw into.", "grid.png, or the next free number", "FILE")] = None,
    copies: Annotated[int, arg(help="Augmented copies of each picture.")] = 8,
    seed: Annotated[int, arg(help="Random seed.")] = 0,
) -> None:
    """Draw augmented copies of images with the weights that a policy gives them."""
    import torch

    from metaaugment.lab.report import photos
    from metaaugment.lab.report.picture import check, save

    if not images:
        raise ValueError("no image is named; give one or more after the policy file")
    refuse("copies", copies, 1 <= copies <= 50, "1 to 50")
    refuse("seed", seed, 0 <= seed < 2**63, f"0 to {2**63 - 1}")
    if out is None:
        names = itertools.chain(["grid.png"], (f"grid-{number}.png" for number in itertools.count(2)))
        out = next(path for path in map(Path, names) if not path.exists())
    check(out, "--out")
    policy = learned(file)
    if policy.needs_labels:
        raise ValueError(
            f"{file} looks at labels, which pictures do not have; show its distribution alone, which you get with "
            "metaaugment export RUN FILE --sampler-only, or in Python with policy.sampler_only()"
        )
    generator = torch.Generator().manual_seed(seed)
    pictures = photos.read(images, policy.source, **photos.as_learned(policy))
    print(save(photos.copies(pictures, policy, copies, generator), out))


def data(
    words: Annotated[
        tuple[str, ...],
        Positional,
        arg(metavar="[get NAME]", help="Fetch a data set; without it, all are listed.", help_behavior_hint=""),
    ] = (),
    data: Annotated[
        Path | None, option("Folder of the data.", "$METAAUGMENT_DATA or ~/.cache/metaaugment", "DIR")
    ] = None,
) -> None:
    """List which data sets are present, where they are looked for, and how to get them; or fetch one.

    When not on a terminal: names, one per line.
    """
    from metaaugment.lab.data.catalog import status
    from metaaugment.lab.data.download import get

    if words and (words[0] != "get" or len(words) != 2):
        raise ValueError(f"metaaugment data {' '.join(words)} is not a command; use data, or data get NAME")
    if words:
        with fetching() as progress:
            sentence = get(words[1], data, progress)
        print(sentence)
        return
    if not on_terminal():
        print("\n".join(one.name for one in status(data)))
        return
    for one in status(data):
        Console().print(f"[bold]{one.name}[/bold]", end="  ")
        Console().print(f"{one.state}  {one.where}", highlight=False, soft_wrap=True, markup=False)
        if one.how:
            Console().print(f"    {one.how}", highlight=False, soft_wrap=True, markup=False)


def worries(run: Path) -> list[str]:
    """Sentences on what looks wrong in a finished run, for those who never look at its report."""
    from metaaugment.lab.report.concerns import concerns
    from metaaugment.lab.report.runs import read

    return concerns(read(run))


def trainer(name: str, args: Sequence[str]) -> Callable[..., None]:
    """The command that trains a recipe: its fields, and where it runs, as flags. `args`: the whole command line."""
    from metaaugment.lab.experiments.paper import RECIPES
    from metaaugment.lab.experiments.place import Place
    from metaaugment.lab.experiments.recipe import Recipe

    def train(recipe: Annotated[Recipe, OmitArgPrefixes], place: Annotated[Place, OmitArgPrefixes]) -> None:
        from metaaugment.lab.experiments import run

        console = Patient(quiet=rank() > 0)
        run.train(recipe, place, console, said(args))
        if rank() == 0:
            for sentence in worries(place.folder(recipe, "runs")):
                console.print(sentence)

    train.__doc__ = RECIPES[name].__doc__
    train.__defaults__ = (RECIPES[name](), Place())  # from which tyro takes those of the flags
    return train


def searcher(kind: "Kind", name: str, args: Sequence[str]) -> Callable[..., None]:
    """The command that searches for a policy, on a recipe's data and with its network. `args`: as for `trainer`."""
    from metaaugment.lab.experiments.place import Place
    from metaaugment.lab.experiments.recipe import Recipe

    def find(
        recipe: Annotated[Recipe, OmitArgPrefixes],
        settings: Annotated[kind.settings, OmitArgPrefixes],  # type: ignore[name-defined]
        place: Annotated[Place, OmitArgPrefixes],
    ) -> None:
        from metaaugment.lab.search.run import search

        search(kind, recipe, settings, place, Patient(), said(args))

    trial = kind.default(name)
    about = f"Data: {trial.dataset}; network: {trial.network}."  # what differs from one to the next in their list
    find.__doc__ = f"{cleandoc(kind.settings.__doc__ or '')}\n\n{about}" if name in args else about
    find.__defaults__ = (trial, kind.settings(), Place())  # as in `trainer`
    return find


def transfer(
    file: Annotated[Path, Positional, arg(help="A policy file.", metavar="FILE")],
    recipe: Annotated[str, Positional, arg(help="Recipe to train under it.", metavar="RECIPE")],
) -> None:
    """Train a recipe under a learned policy: the same as train RECIPE --policy FILE, with the same flags."""
    raise AssertionError("rewritten before it is parsed")


def reproduce(
    names: Annotated[
        tuple[str, ...],
        Positional,
        arg(
            help="Names of tables, rows or comparisons, such as table-3; an unknown name lists all.",
            metavar="NAME",
            help_behavior_hint="(default: none)",
        ),
    ] = (),
    seeds: Annotated[int, arg(help="Runs per entry, one per seed.")] = 5,
    budget: Annotated[str | None, option("Stop after this long (90s, 25m, 2h); rerun the command to continue.")] = None,
    epochs: Annotated[int | None, option("Override the recipe's epochs; such results are kept separate.")] = None,
    methods: Annotated[
        tuple[str, ...], option("Which entries of a row to run, such as baseline or metaaugment-fast.", "all")
    ] = (),
    at_once: Annotated[int | None, option("Runs at a time, which share the device.", "4 on a GPU, else 1")] = None,
    plan: Annotated[bool, arg(help="Only print what is missing, in the order in which it would be run.")] = False,
    data: Annotated[Path | None, option("Folder of the data.", "the same as for train", "DIR")] = None,
    device: Device = None,
    runs: Annotated[Path, arg(help="Folder of the runs; unfinished ones are continued.")] = Path("runs"),
    results: Annotated[Path, arg(help="Folder of the results, one file per run.")] = Path("results"),
    report: Annotated[Path, arg(help="File to write the tables to.")] = Path("RESULTS.md"),
) -> None:
    """Run what is missing from the paper's tables, several runs at a time, within a time budget.

    Each run writes a result file. What a stopped command had begun comes first, then row after row, each seed by seed.
    Without names, the report is rebuilt from the results that exist.
    """
    from metaaugment.lab.experiments.jobs import Where
    from metaaugment.lab.experiments.place import Place
    from metaaugment.lab.experiments.reproduce import check, in_words, planned, reproduce
    from metaaugment.lab.experiments.tables import find_rows
    from metaaugment.lab.search.run import record_of

    where = Where(runs, results, Place(data=data, device=device), record_of)
    if plan:
        if not names:
            raise ValueError("--plan needs the names of what is to be planned, such as table-3")
        check(seeds, budget, epochs, at_once, where, report)
        print("\n".join(in_words(planned(find_rows(names), seeds, epochs, methods, where), report)))
    else:
        reproduce(find_rows(names), seeds, budget, epochs, methods, at_once, where, report, Patient(), worries)


def diagnose(
    run: Annotated[Path, Positional, arg(help="The folder of a run.", metavar="RUN")],
    samples: Annotated[
        int | None,
        option(
            "Approximate number of training samples; more samples give sharper figures.",
            "2048 or five mini-batches, whichever is more",
        ),
    ] = None,
    seed: Annotated[int, arg(help="Random seed.")] = 0,
    data: Annotated[Path | None, option("Folder of the data.", "that of the run", "DIR")] = None,
    device: Device = None,
    picture: Annotated[Path | None, option("Also draw a picture of the results into FILE.", metavar="FILE")] = None,
) -> None:
    """Say whether there is anything to learn at the point where a run is, and whether its policy has learned it.

    The run's network stays as it is; nothing is trained. The figures are written to diagnosis.json in the folder of the
    run, where `metaaugment report` finds them.
    """
    from metaaugment.lab.experiments.diagnosis import diagnose
    from metaaugment.lab.experiments.place import Place
    from metaaugment.lab.experiments.run import as_it_was, read_recipe
    from metaaugment.lab.report import diagnosis
    from metaaugment.lab.report.picture import check, save
    from metaaugment.lab.training import folder
    from metaaugment.lab.training.json_file import write_json
    from metaaugment.lab.training.progress import counted
    from metaaugment.lab.words import number_of

    if picture is not None:
        check(picture, "--picture")
    console = Patient()
    # A run that has come this far has skipped any files that cannot be read.
    was = as_it_was(run, Place(data=data, device=device, corrupt="skip"), console)
    update = was.validation.batch if was.policy_optimizer is not None else None
    learns = read_recipe(run / folder.RECIPE).learns  # also if its last epochs are under the frozen policy
    found = diagnose(was.learner, was.train, was.validation.split, samples, seed, update, counted(console), learns)
    if skipped := len(was.train.reader.unreadable):
        print(f"skipped {number_of('image file', skipped)} that could not be read")
    for line in diagnosis.in_words(found):
        print(line)
    write_json(run / folder.DIAGNOSIS, found.to_json())
    if picture is not None:
        print(save(diagnosis.picture(found).figure, picture))


def report(
    runs: Annotated[
        tuple[Path, ...],
        Positional,
        arg(help="Folders of runs, or folders that hold some.", metavar="RUN", help_behavior_hint="(required)"),
    ],
    out: Annotated[Path, arg(help="The page; an existing one is replaced.", metavar="FILE")] = Path("report.html"),
    figures: Annotated[Path | None, option("Also write each figure as PNG and SVG, at the end.", metavar="DIR")] = None,
    watch: Annotated[bool, arg(help="Follow running trainings: rewrite the page until all are finished.")] = False,
) -> None:
    """Show what the policies of runs learned: one page that opens anywhere, without a server."""
    from metaaugment.lab.report import page

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
        page.watch(runs, write)
    else:
        found = page.Report.of(runs)
        if not found.runs:
            raise ValueError(found.empty[0])
        write(found)
    print(out)
