"""stub"""

from contextlib import contextmanager
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def meta():
    def hook(module, name, p):
        if p is None or p.is_meta:
            return None
        return nn.Parameter(p.to("meta"), requires_grad=p.requires_grad)

    h = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        h.remove()
