"""Shared-prefix training: see ``SharedPrefixLogprobs``."""

from dev.shared_prefix.attention import FlexBackend, SDPABackend, VarlenBackend
from dev.shared_prefix.logprobs import SharedPrefixLogprobs

__all__ = ["FlexBackend", "SDPABackend", "SharedPrefixLogprobs", "VarlenBackend"]
