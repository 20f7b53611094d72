"""Entry point: ``hybrid-distill``, ``python -m hybrid_distill``, ``accelerate launch -m hybrid_distill run RECIPE``."""

from .cli.app import main

if __name__ == "__main__":
    main()
