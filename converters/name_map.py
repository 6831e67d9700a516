"""How a checkpoint's tensors fill a model's parameters, as data.

A NameMap holds Rules; a Rule says which tensors, under their Hugging Face names, make one parameter
and an Op says how they are laid out in it. Shapes and sharding are never written here: both come
from the parameter, so that they are stated once, in the model.
"""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property

ORDINAL = "{i}"


@dataclass(frozen=True)
class Op:
    """Where a rule's tensors lie in the parameter.

    Permuting the parameter's axes by `order` gives the *file layout*: there each tensor is one
    slab, row-major as in the file, and the slabs lie side by side along `axis`. So a tensor is
    never rearranged on the host; the device does one transposition.

    Attributes:
        order: the parameter's axes in the order of the file layout; None: they are the same.
        rows: how many leading axes of the file layout the tensor folds into its first one (the
            rest fold into its second); 0: the tensor has the file layout's shape.
        axis: of the file layout, on which several tensors lie side by side.
        widths: of the tensors along `axis`; a width of 0 takes what the others leave.
        per_kv_head: numbers of the tensors with one row a kv head, which kv replicas repeat.
        replicas: how often each row of those stands in the parameter, one after the other.
        padding: rows of zeros that the parameter has after the tensor's, on the first axis.
    """

    name: str
    order: tuple[int, ...] | None = None
    rows: int = 0
    axis: int = 0
    widths: tuple[int, ...] = (0,)
    per_kv_head: tuple[int, ...] = ()
    replicas: int = 1
    padding: int = 0

    def file_layout(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape with its axes in file order."""
        return shape if self.order is None else tuple(shape[axis] for axis in self.order)

    def slabs(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of each tensor within the file layout of a parameter of shape `shape`."""
        layout = self.file_layout(shape)
        if self.widths == (0,):
            return [layout]
        rest = layout[self.axis] - sum(self.widths)
        return [
            (*layout[: self.axis], width or rest, *layout[self.axis + 1 :]) for width in self.widths
        ]

    def tensor_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of each tensor in the checkpoint."""
        return [self._fold(slab) for slab in self.stored_slabs(shape)]

    def stored_slabs(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """As `slabs`, without what is repeated or padded: so the checkpoint has them."""
        return [
            ((slab[0] - self.padding) // self.repeats(number), *slab[1:]) if slab else slab
            for number, slab in enumerate(self.slabs(shape))
        ]

    def repeats(self, number: int) -> int:
        """How often each row of the tensor stands in its slab."""
        return self.replicas if number in self.per_kv_head else 1

    def _fold(self, slab: tuple[int, ...]) -> tuple[int, ...]:
        if not self.rows:
            return slab
        first, rest = slab[: self.rows], slab[self.rows :]
        return (math.prod(first), math.prod(rest)) if rest else (math.prod(first),)


# Letters as in models/batch.py; G query heads a kv head. On the left the checkpoint.
KEEP = Op("KEEP")
TRANSPOSE = Op("TRANSPOSE", order=(1, 0))  # [out, in] -> [in, out]
QKV = Op(  # [K*G*H, D], [K*H, D] x 2 -> [D, K, G+2, H]
    "QKV", order=(1, 2, 3, 0), rows=3, axis=1, widths=(0, 1, 1), per_kv_head=(1, 2)
)
QKV_BIAS = Op(  # [K*G*H], [K*H] x 2 -> [K, G+2, H]
    "QKV_BIAS", rows=3, axis=1, widths=(0, 1, 1), per_kv_head=(1, 2)
)
HEADS_IN = Op("HEADS_IN", order=(3, 0, 1, 2), rows=1)  # [D, K*G*H] -> [K, G, H, D]
STACK = Op("STACK", order=(1, 2, 0), rows=2, axis=0, widths=(1, 1))  # [F, D] x 2 -> [D, 2, F]
STACK_BIAS = Op("STACK_BIAS", rows=2, axis=0, widths=(1, 1))  # [F] x 2 -> [2, F]


@dataclass(frozen=True)
class Rule:
    """Parameter `param` is made of `tensors` by `op`; "{i}" stands for the same number in all.

    A rule whose parameter the model does not have (a bias that the config turns off) is inactive.
    """

    tensors: tuple[str, ...]
    param: str
    op: Op = KEEP

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.op.widths):
            raise ValueError(
                f"{self.op.name} takes {len(self.op.widths)} tensors, but the rule for "
                f"{self.param} lists {len(self.tensors)}"
            )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.param)

    def sources(self, param: str) -> tuple[str, ...] | None:
        """The names of the tensors that make `param`; None if the rule is not about it."""
        found = self._pattern.fullmatch(param)
        if found is None:
            return None
        ordinal = found.groupdict().get("i", "")
        return tuple(name.replace(ORDINAL, ordinal) for name in self.tensors)


@dataclass(frozen=True)
class NameMap:
    """All rules of an architecture.

    Attributes:
        ignored: tensors that old checkpoints carry and the model computes itself.
        embedding, head: the two tensors that are one where the config ties them.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    _ignored: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ignored", tuple(pattern_of(name) for name in self.ignored))

    def on_mesh(self, kv_replicas: int, vocab_padding: int) -> "NameMap":
        """The map for a model whose kv heads are repeated and whose vocabulary is padded."""
        rules = []
        for rule in self.rules:
            op = replace(rule.op, replicas=kv_replicas) if rule.op.per_kv_head else rule.op
            if rule.tensors in ((self.embedding,), (self.head,)):
                op = replace(op, padding=vocab_padding)
            rules.append(replace(rule, op=op))
        return replace(self, rules=tuple(rules))

    def ignores(self, tensor: str) -> bool:
        """Whether `tensor` is known to be recomputed."""
        return any(pattern.fullmatch(tensor) for pattern in self._ignored)


def pattern_of(name: str) -> re.Pattern[str]:
    """The expression that `name` with "{i}" stands for."""
    return re.compile(re.escape(name).replace(re.escape(ORDINAL), r"(?P<i>\d+)", 1))
