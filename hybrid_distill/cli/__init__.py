"""The command line, and what recipes call."""

from .app import main, run_recipe, run_sweep

__all__ = ["main", "run_recipe", "run_sweep"]
