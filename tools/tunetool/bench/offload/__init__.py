"""``tunetool bench offload``: steps of DeepSpeed's ZeRO-3 whose states lie on drives, beside those in memory."""
