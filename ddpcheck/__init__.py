"""ddpcheck: watches PyTorch DDP jobs and proves that their replicas agree, or pinpoints where they diverge."""

from ddpcheck.version import VERSION as __version__

__all__ = ["__version__"]
