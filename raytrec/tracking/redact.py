"""Hides the secrets that addresses may hold, before others see them."""

from __future__ import annotations

import re

USER_INFO = re.compile(r"(://[^/@\s:]*):[^/@\s]*@")
PARAMETER = re.compile(
    r"([?&][\w-]*(?:password|secret|token|credential|key)[\w-]*=)[^\s&'\"]+", re.IGNORECASE
)


def hide(text: str) -> str:
    """A text whose addresses have no passwords and no secret parameters.

    Example:
        >>> hide("s3://me:pass@bucket?secret_key=abc&region=eu")
        's3://me:***@bucket?secret_key=***&region=eu'
    """
    return PARAMETER.sub(r"\1***", USER_INFO.sub(r"\1:***@", text))
