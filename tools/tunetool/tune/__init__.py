"""The search over DeepSpeed's aio settings on this storage, and the ds_config files that use its result. It may
import ``advise``, ``measure`` and what lies under them."""
