"""Training. The package is callable: `raytrec.train(config)` is `raytrec.train.driver.train(config)`.

Python binds a subpackage to its name in the parent as soon as any module of it is imported, so a function
raytrec.train would be replaced by this package in the middle of a program; a callable package is both.
"""

import sys
from types import ModuleType


class _Train(ModuleType):
    def __call__(self, *args, **kwargs):
        from raytrec.train.driver import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Train
