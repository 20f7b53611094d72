"""Load an unmodified Hugging Face decoder, find its heads, and record or ablate them."""

from ..model.layout import head_dim_of, text_config
from .generation import generate_ids
from .hooks import (
    MixerCall,
    ablate_heads,
    ablate_heads_by_row,
    record_heads,
    replaced_forward,
    replay_blocks,
    trace_mixers,
    watch_calls,
)
from .identity import IMPORTED, fingerprint, float16_note, imported_from
from .loading import (
    DTYPES,
    check_row_length,
    load_config,
    load_on_own_device,
    load_teacher,
    load_tokenizer,
    longest_context,
    read_teacher,
)
from .location import TINY, hub_error
from .modes import eager_attention, eval_mode, may_cache, without_cache
from .sites import (
    SUPPORTED,
    HeadKind,
    HeadSite,
    as_head_kind,
    attention_sites,
    check_exists,
    decoder_blocks,
    head_kinds,
    head_sites,
)
