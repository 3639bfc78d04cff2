"""Calls that are being followed, and how far to follow."""

import dataclasses

from .modules import Module
from .values import Function

STEPS = 60_000  # statements and calls followed for one test
DEPTH = 16  # calls within calls


class Scope:
    """Names of one function call, with the scope it was defined in."""

    def __init__(self, module: Module, parent: "Scope | None" = None):
        self.module, self.parent, self.names = module, parent, {}

    def lookup(self, name: str):
        scope = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return self.module.lookup(name)


@dataclasses.dataclass
class Frame:
    """One call being followed."""

    scope: Scope
    function: Function | None
    doubt: int  # doubt of the caller
    returned: list = dataclasses.field(default_factory=list)
    yielded: int = 0  # doubt added by a yield, taken back at the end
    line: int = 0  # of the statement or call that is being followed
