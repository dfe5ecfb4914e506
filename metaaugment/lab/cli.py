"""The program `metaaugment`: the tree of its commands, and the call that is made of a command line."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING

import metaaugment
from metaaugment.distributed import rank
from metaaugment.lab import commands
from metaaugment.lab.experiments.flags import said
from metaaugment.lab.parsing import HELP, Command, Group, understood
from metaaugment.lab.program import in_a_sentence, write_any_character
from metaaugment.lab.training import launch

if TYPE_CHECKING:
    from metaaugment.lab.search.run import Kind

BENCHES: Mapping[str, Command] = {
    "ops": commands.bench_ops,
    "step": commands.bench_step,
    "transfer": commands.bench_transfer,
}


def main(args: Sequence[str] | None = None) -> None:
    """The program; without arguments, with those of the command line."""
    args = list(sys.argv[1:] if args is None else args)
    write_any_character()
    with launch.ending(), in_a_sentence(args):
        call(args)


def call(args: Sequence[str]) -> None:
    if args[:1] in (["train"], ["transfer"]):
        launch.join()
    if args[:1] in (["search"], ["reproduce"]):
        launch.check_alone(args[0])
    if args == ["--version"]:
        print(metaaugment.__version__)
    elif args == ["bench"]:
        commands.listed(BENCHES)
    else:
        args = rewritten(args)
        understood(tree(args), "metaaugment", args, console_outputs=rank() == 0)()


def rewritten(args: Sequence[str]) -> Sequence[str]:
    """`transfer FILE RECIPE` rewritten as what it stands for, `train RECIPE --policy FILE`, with the same flags."""
    named = args[1:3]
    if args[:1] != ["transfer"] or HELP & set(named):
        return args
    if "policy" in said(args):
        raise ValueError("transfer takes the policy file as its first argument; leave out --policy")
    if len(named) < 2:
        return args
    if any(word.startswith("-") for word in named):
        raise ValueError(f"transfer expects FILE and RECIPE first, but got {' '.join(named)}; put flags after them")
    return ["train", named[1], "--policy", named[0], *args[3:]]


def tree(args: Sequence[str]) -> Group:
    """All commands. Those made of a recipe see the whole command line: a flag that was given outweighs what it says."""
    find = "Search for a policy with a compared system, on any data; the policy found is used like a published one."
    named: dict[str, Group | Command] = {
        "train": Group("recipe", "Train a network with a recipe.", partial(trainers, args)),
        "recipes": commands.recipes,
        "reproduce": commands.reproduce,
        "report": commands.report,
        "diagnose": commands.diagnose,
        "search": Group("system", find, partial(systems, args)),
        "data": commands.data,
        "export": commands.export,
        "inspect": commands.inspect,
        "show": commands.show,
        "transfer": commands.transfer,
        "ops": commands.ops,
        "bench": Group("benchmark", "Benchmark a part of the library.", lambda: BENCHES),
    }
    about = f"{metaaugment.__doc__}\n`metaaugment --version` prints the version."
    return Group("command", about, lambda: named)


def trainers(args: Sequence[str]) -> Mapping[str, Command]:
    from metaaugment.lab.experiments.paper import RECIPES

    return {name: commands.trainer(name, args) for name in RECIPES}


def systems(args: Sequence[str]) -> Mapping[str, Group]:
    from metaaugment.lab.search.run import SEARCHES

    about = {system: cleandoc(kind.settings.__doc__ or "") for system, kind in SEARCHES.items()}
    return {system: Group("recipe", about[system], partial(searchers, kind, args)) for system, kind in SEARCHES.items()}


def searchers(kind: "Kind", args: Sequence[str]) -> Mapping[str, Command]:
    from metaaugment.lab.experiments.paper import RECIPES

    if kind.spread and "address" in said(args) and not HELP & set(args):
        raise ValueError(f"--address is for pba, which can run on Ray; {kind.system} {kind.spread}; leave out the flag")
    return {name: commands.searcher(kind, name, args) for name in RECIPES}
