"""Who this process is. The rest of communication comes with its own part."""

from __future__ import annotations

import torch.distributed as dist


class Communication:
    @staticmethod
    def get_rank() -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @staticmethod
    def get_world_size() -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
