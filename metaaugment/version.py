"""The version of this package, in a module of its own: the list of public names imports everything else."""

__version__ = "0.2.0"
