"""``python -m hybrid_distill``, and ``accelerate launch -m hybrid_distill run RECIPE``."""

from .cli import main

if __name__ == "__main__":
    main()
