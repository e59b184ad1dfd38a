"""The names of a training script, followed in its syntax to where their values come from.

Everything here is an approximation that would rather not know: a value is known where every way it can come from is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
Loop = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
DEEPEST = 25
"""How many steps a value is followed."""

SEEN_THROUGH = {"to", "cuda", "half", "float", "train", "eval", "copy", "deepcopy", "unwrap_model", "extract_model"}
DATASET_METHODS = {
    "map", "shuffle", "filter", "take", "skip", "select", "with_format", "set_format", "remove_columns",
    "rename_column", "rename_columns", "cast", "shard", "repeat", "batch", "to_iterable_dataset", "select_columns",
    "add_column", "sort", "train_test_split", "flatten_indices", "with_transform", "flatten",
}  # fmt: skip
DATASET_WRAPPERS = {
    "split_dataset_by_node", "interleave_datasets", "concatenate_datasets", "islice", "Subset", "DataLoader",
    "random_split", "StatefulDataLoader", "prepare_data_loader", "ChainDataset", "ConcatDataset",
}  # fmt: skip


class Binding(NamedTuple):
    """What a name gets at a statement. item: where it gets one item of the value."""

    node: ast.AST
    how: Literal["value", "parameter", "other"]
    value: ast.expr | None = None
    item: int | None = None


class Origin(NamedTuple):
    """An expression that a value comes from. keys: what of it, where that could not be followed."""

    node: ast.expr
    keys: tuple[Any, ...] = ()


class Entry(NamedTuple):
    """A named argument of a call, or an item of a dict that is splatted into it."""

    name: str
    value: ast.expr
    line: int


class Given(NamedTuple):
    """The named arguments of a call. complete: no others can come out of a splatted value."""

    call: ast.Call
    entries: list[Entry]
    complete: bool

    def get(self, name: str) -> Entry | None:
        return next((entry for entry in reversed(self.entries) if entry.name == name), None)


def line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def dotted(node: ast.AST | None) -> str:
    """ "a.b.c" of names and attributes; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def shown(node: ast.AST | None, most: int = 60) -> str:
    """An expression as text, on one line."""
    if node is None:
        return ""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError, AttributeError):
        text = "..."
    return text if len(text) <= most else text[: most - 3] + "..."


def method(node: ast.AST) -> str:
    """The last part of what a call calls: "prepare" of accelerator.prepare(...)."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def receiver(call: ast.Call) -> ast.expr | None:
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg in names), None)


def argument(call: ast.Call, position: int, *names: str) -> ast.expr | None:
    """A named argument, or the one at a position."""
    found = keyword(call, *names)
    if found is None and len(call.args) > position:
        if not any(isinstance(each, ast.Starred) for each in call.args[: position + 1]):
            found = call.args[position]
    return found


def names_in(node: ast.AST) -> set[str]:
    """The last parts of all names and attributes in an expression."""
    return {
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute | ast.Name)
    }


class Names:
    """The syntax of one script, with what its names stand for."""

    def __init__(self, tree: ast.Module, text: str) -> None:
        self.tree, self.text = tree, text
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {tree: tree}
        self.nodes: list[ast.AST] = []
        self.aliases: dict[str, str] = {}
        self.functions: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.bindings: dict[tuple[Scope, str], list[Binding]] = {}
        self.depth = 0
        self._place()
        for node in self.nodes:
            self._define(node)

    def _place(self) -> None:
        self.nodes.append(self.tree)
        depths: dict[ast.AST, int] = {self.tree: 0}
        for node in self.nodes:
            inner = node if isinstance(node, SCOPES) else self.scopes[node]
            for child in ast.iter_child_nodes(node):
                # Contexts and operators are one object for all their uses.
                if not isinstance(child, ast.expr_context | ast.operator | ast.unaryop | ast.boolop | ast.cmpop):
                    self.parents[child] = node
                    self.scopes[child] = inner
                    self.nodes.append(child)
                    depths[child] = depths[node] + 1
        self.depth = max(depths.values())

    # --- definitions

    def _define(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, node)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                self._bind(node.target, node.value, node)
        elif isinstance(node, ast.AugAssign):
            left = ast.copy_location(_loaded(node.target), node)
            grown = ast.copy_location(ast.BinOp(left, node.op, node.value), node)
            for each in (left, grown):
                self.scopes[each], self.parents[each] = self.scopes[node], node
            self._bind(node.target, grown, node)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._bind_other(node.target, node)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, ast.ClassDef):
            self.classes.setdefault(node.name, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if not isinstance(node, ast.Lambda):
                self.functions.setdefault(node.name, []).append(node)
            for parameter in _parameters(node):
                self.bindings.setdefault((node, parameter.arg), []).append(Binding(parameter, "parameter"))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in node.names:
            if isinstance(node, ast.ImportFrom):
                self.aliases[name.asname or name.name] = f"{node.module or ''}.{name.name}"
            elif name.asname:
                self.aliases[name.asname] = name.name

    def _bind(self, target: ast.expr, value: ast.expr, node: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            starred = any(isinstance(each, ast.Starred) for each in target.elts)
            for index, each in enumerate(target.elts):
                if starred:
                    self._bind_other(each, node)
                elif isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                    self._bind(each, value.elts[index], node)
                elif dotted(each):
                    self._add(each, Binding(node, "value", value, index))
                else:
                    self._bind_other(each, node)
        elif dotted(target):
            self._add(target, Binding(node, "value", value))

    def _bind_other(self, target: ast.expr, node: ast.AST) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name):
                self._add(each, Binding(node, "other"))

    def _add(self, target: ast.expr, binding: Binding) -> None:
        name = dotted(target)
        scope = self._class_of(target) if name.startswith("self.") else self.scopes.get(target)
        if scope is not None:
            if isinstance(scope, ast.ClassDef) and not name.startswith("self."):
                self.bindings.setdefault((scope, f"self.{name}"), []).append(binding)
            self.bindings.setdefault((scope, name), []).append(binding)

    def _class_of(self, node: ast.AST) -> Scope | None:
        return next((each for each in self.ancestors(node) if isinstance(each, ast.ClassDef)), None)

    # --- places

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> Function | None:
        return next(
            (each for each in self.ancestors(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)), None
        )

    def inside(self, root: ast.AST | Iterable[ast.AST]) -> Iterator[ast.AST]:
        """Everything under a node, without what nested functions and classes hold."""
        stack = list(root) if isinstance(root, Iterable) else list(ast.iter_child_nodes(root))
        while stack:
            node = stack.pop()
            yield node
            if not isinstance(node, SCOPES):
                stack.extend(ast.iter_child_nodes(node))

    # --- names

    def full(self, node: ast.AST | None) -> str:
        """The dotted name with import aliases resolved: "torch.nn.utils.clip_grad_norm_". What the script itself
        defines stands under "local."."""
        name = dotted(node)
        head, _, rest = name.partition(".")
        if head in self.aliases:
            return self.aliases[head] + (f".{rest}" if rest else "")
        if not rest and (head in self.functions or head in self.classes):
            return f"local.{head}"
        return name

    def is_from(self, node: ast.AST | None, library: str, *names: str) -> bool:
        """Whether a callee is one of `names` of a library, or such a bare name that nothing in the script defines."""
        full = self.full(node)
        head, _, last = full.rpartition(".")
        if last not in names:
            return False
        if not head:
            return True
        return head.split(".")[0] == library

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls by the last part of the name, import aliases resolved."""
        return [call for name in names for call in self.calls_by_name.get(name, ())]

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Call):
                found.setdefault(self.called(node), []).append(node)
        return found

    def called(self, node: ast.AST) -> str:
        """The last part of the resolved name of what a call calls."""
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Name):
            return self.full(node.func).rpartition(".")[2]
        return method(node)

    def based_on(self, name: str, *names: str) -> bool:
        """Whether a class of the script inherits, directly or over others of the script, from one of `names`."""
        seen: set[str] = set()
        open_names = [name]
        while open_names:
            current = open_names.pop()
            if current in seen or current not in self.classes:
                continue
            seen.add(current)
            for base in self.classes[current].bases:
                last = self.full(base).rpartition(".")[2]
                if last in names:
                    return True
                open_names.append(last)
        return False

    def own_methods(self, name: str) -> set[str]:
        node = self.classes.get(name)
        return {each.name for each in node.body if isinstance(each, ast.FunctionDef)} if node else set()

    def _visible(self, node: ast.expr) -> list[Binding]:
        """What binds a name in the innermost scope that binds it, as far as it can be in effect at `node`."""
        name = dotted(node)
        if not name or node not in self.scopes:
            return []
        if name.startswith("self."):
            owner = self._class_of(node)
            return self.bindings.get((owner, name), []) if owner is not None else []
        scope: Scope | None = self.scopes[node]
        first = scope
        while scope is not None:
            found = (
                self.bindings.get((scope, name), []) if not isinstance(scope, ast.ClassDef) or scope is first else []
            )
            if found:
                return self._reaching(found, node, scope) if scope is first else found
            if "." in name and (scope, name.partition(".")[0]) in self.bindings:
                return []
            scope = self.scopes.get(scope) if scope is not self.tree else None
        return []

    def _reaching(self, bindings: list[Binding], node: ast.expr, scope: Scope) -> list[Binding]:
        line = line_of(node)
        before = [each for each in bindings if line_of_binding(each) < line and not self._holds(each.node, node)]
        found: list[Binding] = []
        for each in sorted(before, key=line_of_binding, reverse=True):
            found.append(each)
            if self._unconditional(each.node, scope):
                return found
        return found or ([] if "." in dotted(node) else bindings)

    def _holds(self, outer: ast.AST, node: ast.AST) -> bool:
        return isinstance(outer, ast.Assign) and any(each is outer for each in self.ancestors(node))

    def _unconditional(self, node: ast.AST, scope: Scope) -> bool:
        for each in self.ancestors(node):
            if each is scope:
                return True
            if isinstance(
                each, ast.If | ast.IfExp | ast.Try | ast.ExceptHandler | ast.comprehension | ast.Match | Loop
            ):
                return False
        return True

    # --- origins

    def origins(self, node: ast.expr | None) -> list[Origin]:
        """The expressions that a value can come from, over assignments, parameters, local functions, `prepare`."""
        found: list[Origin] = []
        if node is not None:
            self._follow(node, (), found, set(), 0)
        return found

    def _follow(
        self, node: ast.expr, keys: tuple[Any, ...], found: list[Origin], seen: set[tuple[ast.AST, Any]], depth: int
    ) -> None:
        mark = (node, keys)
        if depth > DEEPEST or len(found) > 50 or mark in seen:
            return
        seen.add(mark)
        steps = self._steps(node, keys)
        if steps is None:
            found.append(Origin(node, keys))
            return
        for value, rest in steps:
            self._follow(value, rest, found, seen, depth + 1)

    def _steps(self, node: ast.expr, keys: tuple[Any, ...]) -> list[tuple[ast.expr, tuple[Any, ...]]] | None:
        """Where a value comes from, one step back; None where it begins."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name_steps(node, keys)
        if isinstance(node, ast.Subscript):
            key = self._key(node.slice)
            return None if key is None else [(node.value, (key, *keys))]
        if isinstance(node, ast.IfExp):
            return [(node.body, keys), (node.orelse, keys)]
        if isinstance(node, ast.BoolOp):
            return [(each, keys) for each in node.values]
        if isinstance(node, ast.NamedExpr | ast.Await | ast.Starred):
            return [(node.value, keys)]
        if isinstance(node, ast.Tuple | ast.List) and keys and isinstance(keys[0], int):
            inner = node.elts
            known = -len(inner) <= keys[0] < len(inner) and not any(isinstance(each, ast.Starred) for each in inner)
            return [(inner[keys[0]], keys[1:])] if known else None
        if isinstance(node, ast.Dict) and keys:
            values = [
                value
                for key, value in zip(node.keys, node.values, strict=False)
                if isinstance(key, ast.Constant) and key.value == keys[0]
            ]
            return [(values[-1], keys[1:])] if values else None
        if isinstance(node, ast.Call):
            return self._call_steps(node, keys)
        return None

    def _key(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = node.operand.value
            return -value if isinstance(value, int) else None
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | str) else None

    def _name_steps(
        self, node: ast.Name | ast.Attribute, keys: tuple[Any, ...]
    ) -> list[tuple[ast.expr, tuple[Any, ...]]] | None:
        steps: list[tuple[ast.expr, tuple[Any, ...]]] = []
        for binding in self._visible(node):
            if binding.how == "other":
                return None
            if binding.how == "parameter":
                given = self._passed(binding.node)
                if given is None:
                    return None
                steps += [(value, keys) for value in given]
            elif binding.value is not None:
                steps.append((binding.value, keys if binding.item is None else (binding.item, *keys)))
        return steps or None

    def _passed(self, parameter: ast.AST) -> list[ast.expr] | None:
        """What the calls in the script pass for a parameter; None where not all can be seen."""
        function = self.parents.get(self.parents.get(parameter, parameter))
        if not isinstance(parameter, ast.arg) or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        in_class = isinstance(self.parents.get(function), ast.ClassDef)
        calls = self.calls_of(function)
        if not calls or parameter.arg in ("self", "cls"):
            return None
        values: list[ast.expr] = []
        for call in calls:
            value = keyword(call, parameter.arg)
            if value is None and parameter.arg in names:
                position = names.index(parameter.arg) - (1 if in_class else 0)
                value = argument(call, position) if position >= 0 else None
            if value is None:
                value = _default(function, parameter.arg)
            if value is None:
                return None
            values.append(value)
        return values

    def calls_of(self, function: Function) -> list[ast.Call]:
        """The calls of a function of the script. Those of methods go by name."""
        if len(self.functions.get(function.name, ())) != 1:
            return []
        name = function.name
        parent = self.parents.get(function)
        if isinstance(parent, ast.ClassDef):
            if name == "__init__":
                return self.calls(parent.name)
            return [call for call in self.calls(name) if isinstance(call.func, ast.Attribute)]
        return [call for call in self.calls(name) if isinstance(call.func, ast.Name)]

    def local_function(self, call: ast.Call) -> Function | None:
        """The function of the script that a call runs, where there is one of that name."""
        name = dotted(call.func)
        if name.startswith("self."):
            name = name.removeprefix("self.")
        candidates = self.functions.get(name, []) if "." not in name and name not in self.aliases else []
        return candidates[0] if len(candidates) == 1 else None

    def returned(self, function: Function) -> list[ast.expr]:
        return [node.value for node in self.inside(function.body) if isinstance(node, ast.Return) and node.value]

    def _call_steps(self, call: ast.Call, keys: tuple[Any, ...]) -> list[tuple[ast.expr, tuple[Any, ...]]] | None:
        function = self.local_function(call)
        if function is not None:
            is_generator = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in self.inside(function.body))
            values = self.returned(function)
            return [(value, keys) for value in values] if values and not is_generator else None
        name = method(call)
        if name in ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer", "prepare_scheduler"):
            return self._prepare_steps(call, keys)
        if name == "broadcast_object_list" and call.args and keys:
            return [(call.args[0], keys)]
        if name in SEEN_THROUGH:
            inner = (
                call.args[0] if name in ("deepcopy", "unwrap_model", "extract_model") and call.args else receiver(call)
            )
            return [(inner, keys)] if inner is not None else None
        return None

    def _prepare_steps(self, call: ast.Call, keys: tuple[Any, ...]) -> list[tuple[ast.expr, tuple[Any, ...]]] | None:
        if not self.is_accelerator(receiver(call)) or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        if len(call.args) == 1:
            return [(call.args[0], keys)]
        if keys and isinstance(keys[0], int) and -len(call.args) <= keys[0] < len(call.args):
            return [(call.args[keys[0]], keys[1:])]
        return None

    def sources(self, node: ast.expr | None) -> list[ast.expr]:
        """All expressions on the way of a dataset or loader: origins, and what their methods and wrappers take."""
        found: list[ast.expr] = []
        open_nodes = [node] if node is not None else []
        seen: set[ast.AST] = set()
        while open_nodes and len(found) < 100:
            for origin in self.origins(open_nodes.pop()):
                if origin.node in seen:
                    continue
                seen.add(origin.node)
                found.append(origin.node)
                open_nodes += self._taken(origin.node)
        return found

    def _taken(self, node: ast.expr) -> list[ast.expr]:
        if isinstance(node, ast.Subscript):
            return [node.value]
        if not isinstance(node, ast.Call):
            return []
        name = self.called(node)
        taken = receiver(node)
        if name in DATASET_METHODS and taken is not None:
            return [taken]
        if name in DATASET_WRAPPERS:
            first = argument(node, 0, "dataset", "datasets")
            return list(first.elts) if isinstance(first, ast.List | ast.Tuple) else [first] if first is not None else []
        return []

    # --- values

    def constant(self, node: ast.expr | None) -> Any:
        """The value of an expression, where it can only be one plain value; None otherwise."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand) if isinstance(node.operand, ast.Constant) else None
            return -value if isinstance(value, int | float) else None
        if isinstance(node, ast.BinOp):
            return None
        origins = self.origins(node)
        if len(origins) == 1 and not origins[0].keys and origins[0].node is not node:
            inner = origins[0].node
            return self.constant(inner) if isinstance(inner, ast.Constant | ast.UnaryOp) else None
        return None

    def given(self, call: ast.Call) -> Given:
        """The named arguments of a call, with the items of the dicts that are splatted into it."""
        entries: list[Entry] = []
        complete = not any(isinstance(each, ast.Starred) for each in call.args)
        for each in call.keywords:
            if each.arg is not None:
                entries.append(Entry(each.arg, each.value, line_of(each)))
            else:
                items, known = self._items(each.value, 0)
                entries += items
                complete = complete and known
        return Given(call, entries, complete)

    def _items(self, node: ast.expr, depth: int) -> tuple[list[Entry], bool]:
        """The items of a mapping, and whether these are all."""
        if depth > 4:
            return [], False
        entries: list[Entry] = []
        complete = True
        origins = self.origins(node)
        for origin in origins:
            items, known = self._literal_items(origin, depth)
            entries += items
            complete = complete and known
        name = dotted(node)
        return entries + (self._set_items(name, self.scopes.get(node)) if name else []), complete and len(origins) == 1

    def _literal_items(self, origin: Origin, depth: int) -> tuple[list[Entry], bool]:
        node = origin.node
        if origin.keys:
            return [], False
        if isinstance(node, ast.Call) and self.full(node.func) == "dict" and not node.args:
            given = self.given(node)
            return given.entries, given.complete
        if not isinstance(node, ast.Dict):
            return [], False
        entries: list[Entry] = []
        complete = True
        for key, value in zip(node.keys, node.values, strict=False):
            if key is None:
                items, known = self._items(value, depth + 1)
                entries += items
                complete = complete and known
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                entries.append(Entry(key.value, value, line_of(key)))
            else:
                complete = False
        return entries, complete

    def _set_items(self, name: str, scope: Scope | None) -> list[Entry]:
        """Items that statements of a scope put into a mapping: x["key"] = ..., x.update(key=...)."""
        entries: list[Entry] = []
        for node in self._statements_on.get(name, ()):
            if self.scopes.get(node) is not scope:
                continue
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and dotted(target.value) == name:
                        key = self._key(target.slice)
                        if isinstance(key, str):
                            entries.append(Entry(key, node.value, line_of(node)))
            elif isinstance(node, ast.Call):
                entries += [Entry(each.arg, each.value, line_of(each)) for each in node.keywords if each.arg]
                for each in node.args[:1]:
                    if isinstance(each, ast.Dict):
                        entries += self._literal_items(Origin(each), 3)[0]
        return entries

    @cached_property
    def _statements_on(self) -> dict[str, list[ast.AST]]:
        found: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Subscript):
                        found.setdefault(dotted(target.value), []).append(node)
            elif isinstance(node, ast.Call) and method(node) == "update":
                found.setdefault(dotted(receiver(node)), []).append(node)
        return found

    # --- processes

    def is_accelerator(self, node: ast.AST | None) -> bool:
        last = dotted(node).rpartition(".")[2].lower()
        if last in ("accelerator", "accel", "acc", "accelerate", "fabric"):
            return last != "fabric"
        return isinstance(node, ast.Name) and any(
            isinstance(origin.node, ast.Call) and self.called(origin.node) == "Accelerator"
            for origin in self.origins(node)
        )

    def accelerator_calls(self, *names: str) -> list[ast.Call]:
        return [call for call in self.calls(*names) if self.is_accelerator(receiver(call))]


def line_of_binding(binding: Binding) -> int:
    node = binding.node
    return line_of(node.context_expr) if isinstance(node, ast.withitem) else line_of(node)


def _parameters(node: Function | ast.Lambda) -> list[ast.arg]:
    given = node.args
    starred = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def _default(function: Function, name: str) -> ast.expr | None:
    positional = [*function.args.posonlyargs, *function.args.args]
    with_default = positional[len(positional) - len(function.args.defaults) :]
    for parameter, value in zip(with_default, function.args.defaults, strict=False):
        if parameter.arg == name:
            return value
    for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=False):
        if parameter.arg == name:
            return default
    return None


def _loaded(target: ast.expr) -> ast.expr:
    """An assignment's target as the expression that reads it."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return target
