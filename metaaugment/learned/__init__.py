"""A learned policy: what it is, its file, what it was learned with, and its frozen parts."""
