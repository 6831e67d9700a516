"""The pickle inside a PyTorch file, read by an interpreter that cannot call anything.

`torch.save` pickles a state dict as calls of a few functions that rebuild tensors; see
torch_tensors.py for them. The name of any other function or class ends the reading, so that
nothing from the file is ever imported or run.
"""

import pickletools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from jaxllm.converters.torch_tensors import (
    GLOBALS,
    Function,
    PickleError,
    StoredTensor,
    checked_key,
    find_global,
    kind_of,
    rebuild_storage,
    refuse,
    shortened,
)


def read_state_dict(pickled: bytes) -> dict[str, StoredTensor]:
    """The tensors of a pickled state dict by name, in its order.

    Raises:
        PickleError: damaged, no dict of tensors, or it names a function or class that no tensor
            needs; the message completes "FILE ...".
    """
    try:
        value = _Machine().run(pickled)
    except PickleError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, struct.error) as error:
        detail = " ".join(str(error).split())[:120]
        raise PickleError(f"is damaged: its pickle cannot be read ({detail}).") from None
    if not isinstance(value, dict):
        raise PickleError(f"holds no dict of tensors but {kind_of(value)}: save a state dict.")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, StoredTensor):
            raise PickleError(
                f"holds {kind_of(tensor)} under {shortened(name)}, where a state dict has a "
                f"tensor: save the model's state_dict() alone."
            )
    return value


def first_refused(data: bytes) -> str | None:
    """The first function or class in consecutive pickles that no tensor needs, None if none."""
    try:
        texts: list[str] = []
        for opcode, argument, _ in _operations_of_all(data):
            if opcode in ("GLOBAL", "INST"):
                name = str(argument).replace(" ", ".")
            elif opcode == "STACK_GLOBAL":
                name = ".".join(texts[-2:])
            else:
                if isinstance(argument, str):
                    texts.append(argument)
                continue
            if name not in GLOBALS:
                return name
    except (ValueError, TypeError, IndexError, OverflowError, struct.error):
        pass
    return None


def _operations_of_all(data: bytes) -> Iterator[tuple[str, Any, int]]:
    start = 0
    while start < len(data):
        position = 0
        for opcode, argument, at in pickletools.genops(data[start:]):
            position = at or 0
            yield opcode.name, argument, start + position
        start += position + 1


class _Machine:
    """A pickle's stack and memo. Values are what JSON has, tuples, and the records above."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            else:
                step = getattr(self, f"op_{name.lower()}", None)
                if step is None:
                    raise PickleError(f"is refused: its pickle uses {name}, which no tensor needs.")
                step(argument)
        raise PickleError("is damaged: its pickle has no end.")

    def op_proto(self, _: int) -> None: ...

    def op_frame(self, _: int) -> None: ...

    def op_mark(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def _above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def op_tuple(self, _: None) -> None:
        self.stack.append(tuple(self._above_mark()))

    def _last(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(values)

    def op_tuple1(self, _: None) -> None:
        self._last(1)

    def op_tuple2(self, _: None) -> None:
        self._last(2)

    def op_tuple3(self, _: None) -> None:
        self._last(3)

    def op_memoize(self, _: None) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def op_binput(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def op_binget(self, index: int) -> None:
        self.stack.append(self.memo[index])

    op_put = op_long_binput = op_binput
    op_get = op_long_binget = op_binget

    def op_append(self, _: None) -> None:
        value = self.stack.pop()
        self._top(list).append(value)

    def op_appends(self, _: None) -> None:
        values = self._above_mark()
        self._top(list).extend(values)

    def op_setitem(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[checked_key(key)] = value

    def op_setitems(self, _: None) -> None:
        values = self._above_mark()
        target = self._top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[checked_key(key)] = value

    def op_build(self, _: None) -> None:
        """A state dict's `_metadata`, which says nothing of its tensors."""
        self.stack.pop()
        self._top(dict)

    def _top(self, kind: type) -> Any:
        top = self.stack[-1]
        if not isinstance(top, kind):
            raise TypeError(f"a {kind.__name__} is needed")
        return top

    def op_global(self, names: str) -> None:
        self.stack.append(find_global(*names.split(" ", 1)))

    def op_stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(find_global(str(module), str(name)))

    def op_inst(self, names: str) -> None:
        refuse(names.replace(" ", "."))

    def op_binpersid(self, _: None) -> None:
        self.stack.append(rebuild_storage(self.stack.pop()))

    def op_reduce(self, _: None) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Function) or not isinstance(arguments, tuple):
            raise TypeError("a call of what is no function")
        try:
            self.stack.append(function.make(*arguments))
        except TypeError:
            raise PickleError(
                f"calls {function.name} with {len(arguments)} arguments that it does not take."
            ) from None


_NUMBERS = "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT"
_TEXTS = (
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8"
)
_LITERALS = frozenset(f"{_NUMBERS} {_TEXTS}".split())
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
