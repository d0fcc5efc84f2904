"""What stands for an object that a forward returns, of which no step gives anything.

`None` would be taken for something: for no keys and values, as a text's next token is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from merakc.errors import ConfigError


@dataclass(frozen=True)
class Absent:
    """The output of this name, of a class of this name. Whatever is asked of it is an error."""

    output: str
    kind: str

    def _asked(self, *_: Any) -> NoReturn:
        raise ConfigError(
            f"the model's output '{self.output}' is a {self.kind}, which its forward makes and a "
            "step does not give, only tensors and plain values; a cache of keys and values is "
            "given where the call asks for it (use_cache=True) in evaluation, or is given one "
            "that was made outside (past_key_values=DynamicCache(config=model.config))"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which copies and the like look for
            raise AttributeError(name)
        self._asked()

    __iter__ = __len__ = __bool__ = __getitem__ = __contains__ = __call__ = _asked
