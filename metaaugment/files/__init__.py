"""Files that are whole or refused, and are written whole or not at all."""
