"""The text form of a graph, which parses back: `parse_graph(graph_text(graph)) == graph`.

A line is an input, a node or an output. `str(graph)` is the short form, which leaves out more:

    parameter %weight: float32[4,8] layers.0.weight requires_grad
    %linear: float32[2,4] = aten.linear.default(%x, %weight, None)  # layers.0 at model.py:12
    loss loss = %linear

A name that is empty or has spaces or quotes in it stands in quotes, as JSON has it. An argument is
a value, a literal of Python, a dtype by its name, another constant of torch's with its prefix, or
several in parentheses. An opaque module is said by its key. What has no text, a size that only the
values of a batch say, stands in angle brackets, and is refused by the parser.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch

from merakc.errors import ConfigError
from merakc.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorSpec,
    dtype_name,
)
from merakc.kernels.opaque import OPAQUE, OPAQUE_BACKWARD, REACHED, is_entered

NAME: Final = r'"(?:[^"\\]|\\.)*"|[^\s"]+'
SPEC: Final = r"\w+\[[^\]]*\]"
INPUT: Final = re.compile(
    rf"(\w+) %(\S+): ({SPEC})(?: (?!requires_grad$)({NAME}))?( requires_grad)?"
)
NODE: Final = re.compile(rf"%(\S+): ((?:none|{SPEC})(?:, (?:none|{SPEC}))*) = ([^\s(]+)\(")
NODE_END: Final = re.compile(rf"( no_grad)?(?:  # ({NAME}) at ({NAME}))?")
OUTPUT: Final = re.compile(rf"(\w+) ({NAME}) = %(\S+)")
REF: Final = re.compile(r"(.+?)(?::(\d+))?")
TOKEN: Final = re.compile(
    r"""(?P<ref>%[^\s,()]+)|(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"|(?P<number>-?(?:inf|nan|\d[\d.]*(?:e[+-]?\d+)?)(?![\w.]))|(?P<complex>complex\([^)]*\))"
    r"|(?P<device>device\([^)]*\))|(?P<unsaid><[^>]*>)|(?P<word>[\w.]+)|(?P<mark>[(),=])"
)
WORDS: Final = {"None": None, "True": True, "False": False}
TORCH_TYPES: Final = (torch.layout, torch.memory_format)


def graph_text(graph: Graph) -> str:
    """The text form of a graph, without its `constants` and `functions`."""
    lines = [_input_text(i) for i in graph.inputs]
    lines += [_node_text(n) for n in graph.nodes]
    lines += [f"{o.kind} {_name_text(o.name)} = {_ref_text(o.ref)}" for o in graph.outputs]
    return "\n".join(lines)


def _input_text(item: Input) -> str:
    target = f" {_name_text(item.target)}" if item.target or item.requires_grad else ""
    grad = " requires_grad" if item.requires_grad else ""
    return f"{item.kind} %{item.name}: {_spec_text(item.spec)}{target}{grad}"


def _node_text(node: Node) -> str:
    parts = [*map(_arg_text, node.args), *(f"{k}={_arg_text(v)}" for k, v in node.kwargs)]
    made = ", ".join(map(_spec_text, node.outputs))
    grad = "" if node.grad else " no_grad"
    where = ""
    if node.module or node.source:
        where = f"  # {_name_text(node.module)} at {_name_text(node.source)}"
    return f"%{node.name}: {made} = {node.op}({', '.join(parts)}){grad}{where}"


def _name_text(name: str) -> str:
    plain = re.fullmatch(r'[^\s"]+', name) and name.isprintable() and name != "requires_grad"
    return name if plain else json.dumps(name)


def _spec_text(spec: TensorSpec | None) -> str:
    if spec is None:
        return "none"
    sizes = (str(n) if isinstance(n, int) else f"<{n}>" for n in spec.shape)
    return f"{dtype_name(spec.dtype)}[{','.join(sizes)}]"


def _ref_text(ref: Ref) -> str:
    """A reference as `str` writes it, with `:0` where the name itself ends like an index."""
    return f"{ref}:0" if ref.index == 0 and re.search(r":\d+$", ref.node) else str(ref)


def _arg_text(value: Any) -> str:
    match value:
        case Ref():
            return _ref_text(value)
        case tuple():
            return f"({', '.join(map(_arg_text, value))})"
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case torch.dtype():
            return dtype_name(value)
        case None | bool() | int() | float() | str() | torch.device():
            return repr(value)
        case torch.layout() | torch.memory_format():
            return str(value)
        case _:
            return f"<{type(value).__name__} {value!r}>".replace("\n", " ")


def parse_graph(
    text: str,
    constants: Mapping[str, torch.Tensor] = {},
    functions: Mapping[str, Callable[..., Any]] = {},
) -> Graph:
    """The graph of a text form, with the tensors and Python callables that a text does not hold.

    Raises `ConfigError`, with the number of the line, for text that is no graph, for what only the
    values of a batch say, and for an opaque module that this process has not recorded.
    """
    inputs, nodes, outputs = [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        parser = _Line(line, number)
        if line.startswith("%"):
            nodes.append(parser.node())
        elif (found := INPUT.fullmatch(line)) and found[1] in set(InputKind):
            inputs.append(parser.input(found))
        elif (found := OUTPUT.fullmatch(line)) and found[1] in set(OutputKind):
            outputs.append(Output(_name(found[2]), OutputKind(found[1]), _ref(found[3])))
        else:
            parser.refuse("is no input, node or output")
    graph = Graph(tuple(inputs), tuple(nodes), tuple(outputs), constants, functions)
    try:
        graph.verify()
    except AssertionError as error:
        raise ConfigError(
            f"the text is no graph: {error}; give one that graph_text wrote"
        ) from error
    return graph


def _name(text: str | None) -> str:
    return json.loads(text) if text and text.startswith('"') else text or ""


def _ref(text: str) -> Ref:
    name, index = REF.fullmatch(text).groups()  # type: ignore[union-attr]  # anything matches
    return Ref(name, int(index or 0))


class _Line:
    """A line, and how much of it has been read."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number, self.place = text, number, 0

    def refuse(self, problem: str) -> NoReturn:
        raise ConfigError(
            f"line {self.number}: {self.text[self.place :]!r} {problem}; give a graph that "
            "graph_text wrote"
        )

    def input(self, found: re.Match[str]) -> Input:
        _, name, spec, target, grad = found.groups()
        made = self.spec(spec)
        assert made is not None
        return Input(name, InputKind(found[1]), made, _name(target), grad is not None)

    def node(self) -> Node:
        start = NODE.match(self.text)
        if start is None:
            self.refuse("is no node")
        self.place = start.end()
        name, specs, op = start.groups()
        made = tuple(self.spec(s) for s in re.findall(rf"none|{SPEC}", specs))
        args, kwargs = self.arguments()
        end = NODE_END.fullmatch(self.text, self.place)
        if end is None:
            self.refuse("is no end of a node")
        if op in (OPAQUE, OPAQUE_BACKWARD, REACHED):
            for key in (a for a in args if isinstance(a, str)):
                if not is_entered(key):
                    self.refuse(f"runs the module of {key!r}, which this process has not recorded")
        return Node(
            name,
            op,
            args,
            kwargs,
            made,
            module=_name(end[2]),
            source=_name(end[3]),
            grad=end[1] is None,
        )

    def spec(self, text: str) -> TensorSpec | None:
        if text == "none":
            return None
        dtype, _, sizes = text.rstrip("]").partition("[")
        numbers = sizes.split(",") if sizes else []
        if "<" in sizes:
            self.refuse("has a size that only the values of a batch say")
        if not isinstance(getattr(torch, dtype, None), torch.dtype) or not all(
            n.isdigit() for n in numbers
        ):
            self.refuse(f"has {text}, which is no dtype and shape")
        return TensorSpec(tuple(map(int, numbers)), getattr(torch, dtype))

    def token(self) -> re.Match[str]:
        """The next token, which is read."""
        found = TOKEN.match(self.text, self.place)
        if found is None:
            self.refuse("is no argument")
        self.place = found.end()
        return found

    def arguments(self) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """What stands up to the closing parenthesis: by place, and by name."""
        args: list[Any] = []
        kwargs: list[tuple[str, Any]] = []
        while self.text[self.place : self.place + 1] != ")":
            key = re.compile(r"(\w+)=").match(self.text, self.place)
            if key:
                self.place = key.end()
                kwargs.append((key[1], self.value()))
            else:
                args.append(self.value())
            if self.text.startswith(", ", self.place):
                self.place += 2
            elif self.text[self.place : self.place + 1] != ")":
                self.refuse("follows an argument")
        self.place += 1
        return tuple(args), tuple(kwargs)

    def value(self) -> Any:
        found = self.token()
        text = found[0]
        match found.lastgroup:
            case "ref":
                return _ref(text[1:])
            case "string":
                return ast.literal_eval(text)
            case "number":
                return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
            case "complex":
                return complex(*map(float, text[8:-1].split(",")))
            case "device":
                return torch.device(*re.findall(r"type='(\w+)'", text), *_index(text))
            case "mark" if text == "(":
                return self.arguments()[0]
            case "word":
                return self.word(text)
            case "unsaid":
                self.refuse("is known only from the values of a batch, and has no text")
            case _:
                self.refuse("is no argument")

    def word(self, text: str) -> Any:
        """A constant of Python's or torch's."""
        if text in WORDS:
            return WORDS[text]
        found = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(found, TORCH_TYPES if text.startswith("torch.") else torch.dtype):
            self.refuse(f"starts with {text}, which is no constant of torch's")
        return found


def _index(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"index=(\d+)", text)]
