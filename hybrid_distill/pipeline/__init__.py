"""A run, from its config to a finished folder."""

from .finished import finished_run, last_stage, trained_student
from .folder import is_run
from .inputs import RunInputs
from .paths import RunPaths
