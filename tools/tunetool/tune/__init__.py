"""The search over DeepSpeed's aio settings on this storage, and the ds_config files that use what it chose. It may
import ``advise``, ``measure`` and what lies under them."""
