"""A rank of `anyrank check`: run a script up to its first optimizer step, and check there.

Started as `python -m anyrank.watching.first_step RESULT SCRIPT ARGUMENTS`; `-m MODULE` may replace
the script. Public hooks of torch show the modules that run a forward, and the optimizer steps. An
optimizer that lacks parameters may be one of several. In that case it steps, and the check runs
before the next forward.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from anyrank.errors import AnyrankError
from anyrank.watching.check import check_now
from anyrank.watching.launched import run_program
from anyrank.watching.slow import find_model, parameters_of
from anyrank.world.ranks import open_ranks


class FirstStep:
    """The modules and optimizers that a script uses until its first step.

    Args:
        result: path of the file that rank 0 writes.
    """

    def __init__(self, result: str) -> None:
        self.result = result
        self.seen: dict[int, nn.Module] = {}  # modules that ran a forward
        self.frozen: dict[int, tuple[nn.Parameter, int]] = {}  # with the version of each
        self.optimizers: list[Optimizer] = []
        self.model: nn.Module | None = None
        self.seed = torch.initial_seed()  # with which the last forward ran

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Record a module before its forward; a hook of all modules."""
        if module is self.model:
            self.conclude()
        self.seed = torch.initial_seed()
        for parameter in module.parameters() if id(module) not in self.seen else ():
            if not parameter.requires_grad:
                self.frozen.setdefault(id(parameter), (parameter, parameter._version))
        self.seen.setdefault(id(module), module)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check before the first step; a hook of all optimizers. Collective."""
        if any(optimizer is known for known in self.optimizers):
            self.conclude()
        self.optimizers.append(optimizer)
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):  # it runs the forward, as in Lightning
            with torch.enable_grad():
                closure()
        self.model = find_model([*self.seen.values()], self.optimizers)
        with open_ranks(call="check()", may_be_alone=True) as ranks:
            misses = ranks.any("the first step", self.model is not None and self.misses())
        if not misses:
            self.conclude()

    def misses(self) -> bool:
        """Return whether the model has trainable parameters that no known optimizer has."""
        stepped = parameters_of(self.optimizers)
        model = self.model
        assert model is not None
        return any(p.requires_grad and id(p) not in stepped for p in model.parameters())

    def conclude(self) -> NoReturn:
        """Check, write the findings, and end the process. Collective."""
        try:
            text = self.check()
        except AnyrankError as error:
            text = json.dumps({"error": str(error)})
        if os.environ.get("RANK", "0") == "0":
            with open(self.result, "w", encoding="utf-8") as file:
                file.write(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # so that the script does nothing more

    def check(self) -> str:
        """Return the findings as JSON. Collective."""
        if self.model is None:
            raise AnyrankError("no module that ran its forward has parameters of the optimizer")
        is_seeded = self.seed != torch.initial_seed()  # an ElasticLoader seeds each microbatch
        written = {key for key, (p, version) in self.frozen.items() if p._version != version}
        return check_now(
            self.model, self.optimizers, None, written=written, is_seeded=is_seeded
        ).to_json()


def main(result: str, *program: str) -> None:
    """Run the program; the hooks end the process."""
    first = FirstStep(result)
    register_module_forward_pre_hook(first.before_forward)
    register_optimizer_step_pre_hook(first.before_step)
    run_program(program)
    if first.optimizers:  # it lacks parameters, and the script ended after its step
        first.conclude()


if __name__ == "__main__":
    main(*sys.argv[1:])
