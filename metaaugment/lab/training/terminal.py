"""Whether anyone looks at what is printed."""

import sys
from typing import TextIO


def on_terminal(stream: TextIO | None = None) -> bool:
    """Whether a stream, by default the standard output, is a terminal, whatever FORCE_COLOR makes of colors."""
    stream = stream or sys.stdout
    return stream is not None and stream.isatty()
