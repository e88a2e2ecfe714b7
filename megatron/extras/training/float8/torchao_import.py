"""The functions of torchao that float8 needs.

The import takes seconds. It logs lines about kernels that are not used here, which are suppressed.
"""

import logging

_LOGGERS = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _LOGGERS]
for _logger in _LOGGERS:
    _logger.setLevel(logging.ERROR)
try:
    from torchao.float8.float8_utils import amax_to_scale, pad_tensor_for_matmul
finally:
    for _logger, _level in zip(_LOGGERS, _levels, strict=True):
        _logger.setLevel(_level)

__all__ = ["amax_to_scale", "pad_tensor_for_matmul"]
