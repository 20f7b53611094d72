"""Processes of one launch, from the launcher's environment variables to what they decide together.

Importing this package loads neither torch nor accelerate: the command line uses it before it loads
them.
"""

from .connection import (
    build_whole_models,
    connect,
    disconnect,
    limit_collectives,
    make_accelerator,
    own_device,
    rank_and_world,
)
from .coordination import (
    agree_on,
    compute_everywhere,
    from_main,
    on_main_process,
    own_share,
    wait_for_all,
)
from .device_check import device_summary
from .devices import Dtype, chosen_dtype, computes_on_gpu, multiplies_bf16, warn_of_emulation
from .exchange import OtherProcessError
from .launch import (
    LaunchRefused,
    WorldError,
    is_first_on_machine,
    is_launched_main,
    is_launched_with_others,
)
from .shared_folder import UnsharedFolder, alone_in, check_shared
