"""The command line, and what recipes call. Importing it loads no library."""

from .app import main, run_recipe

__all__ = ["main", "run_recipe"]
