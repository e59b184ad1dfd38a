"""What a training script does, read from its syntax: processes and ranks, training loops, guards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

from scaletool.doctor.documents import Document
from scaletool.doctor.rules.names import DEEPEST, LOOPS, SCOPES, Function, Loop, Names, dotted, method, shown

DEEPEST_NESTING = 200
WORLD_NAME = re.compile(
    r"(world|world_?size|num_?processes|n_?procs?|num_?procs|n_?gpus?|num_?gpus?|gpu_count|num_?devices|num_?ranks"
    r"|n_?ranks)",
    re.IGNORECASE,
)
RANK_NAME = re.compile(
    r"(global_?|local_?|node_?|world_?|dist_?)?rank|(local_)?process_?(index|idx|id)|(proc|rank)_?(id|idx)",
    re.IGNORECASE,
)
MAIN_NAMES = {"is_main_process", "is_local_main_process", "is_world_process_zero", "is_local_process_zero", "is_main"}


class Growth(NamedTuple):
    """How an expression grows with the number of processes: a power, between low and high.

    remultiplied: it is multiplied by the number of processes after it was divided by it. bases: what else is in it,
    divisors: and what it is divided by, as written.
    """

    low: int = 0
    high: int = 0
    remultiplied: bool = False
    bases: frozenset[str] = frozenset()
    divisors: frozenset[str] = frozenset()


def script_of(document: Document) -> Script | None:
    """The script behind a document; None for other documents, and where expressions are nested beyond sense."""
    script = _script_of(document.tree, document.text) if document.tree is not None else None
    return script if script is not None and script.depth <= DEEPEST_NESTING else None


@lru_cache(maxsize=64)
def _script_of(tree: ast.Module, text: str) -> Script:
    return Script(tree, text)


class Script(Names):
    """A script with what is known of its processes and loops."""

    # --- processes

    def is_world(self, node: ast.expr, follow: bool = True) -> bool:
        """Whether an expression is the number of processes."""
        if isinstance(node, ast.Attribute) and WORLD_NAME.fullmatch(node.attr):
            return True
        if isinstance(node, ast.Subscript | ast.Call) and "WORLD_SIZE" in _texts(node):
            return isinstance(node, ast.Subscript) or self.called(node) in ("int", "get", "getenv")
        if isinstance(node, ast.Call):
            return self.called(node) in ("get_world_size", "device_count", "world_size")
        if not isinstance(node, ast.Name):
            return False
        origins = self.origins(node) if follow else []
        if any(self.is_world(origin.node, follow=False) for origin in origins if origin.node is not node):
            return True
        unknown = all(origin.node is node or isinstance(origin.node, ast.Name | ast.Attribute) for origin in origins)
        return unknown and bool(WORLD_NAME.fullmatch(node.id))

    def is_rank(self, node: ast.expr | None) -> bool:
        """Whether an expression is this process' number."""
        if isinstance(node, ast.Attribute):
            return bool(RANK_NAME.fullmatch(node.attr))
        if isinstance(node, ast.Call):
            return self.called(node) in ("get_rank", "get_node_local_rank", "get_local_rank") or (
                bool({"RANK", "LOCAL_RANK"} & _texts(node)) and self.called(node) in ("int", "get", "getenv")
            )
        if isinstance(node, ast.Subscript):
            return bool({"RANK", "LOCAL_RANK"} & _texts(node))
        if isinstance(node, ast.Name):
            return bool(RANK_NAME.fullmatch(node.id)) or any(
                origin.node is not node and not isinstance(origin.node, ast.Name) and self.is_rank(origin.node)
                for origin in self.origins(node)
            )
        return False

    def growth(self, node: ast.expr | None) -> Growth:
        """How an expression grows with the number of processes."""
        return self._growth(node, frozenset(), 0) if node is not None else Growth()

    def _growth(self, node: ast.expr, seen: frozenset[ast.AST], depth: int) -> Growth:
        if depth > DEEPEST or node in seen:
            return Growth()
        seen = seen | {node}
        if self.is_world(node):
            return Growth(1, 1)
        if isinstance(node, ast.Constant):
            return Growth()
        if isinstance(node, ast.UnaryOp):
            return self._growth(node.operand, seen, depth + 1)
        if isinstance(node, ast.BinOp):
            return self._binary_growth(node, seen, depth + 1)
        if isinstance(node, ast.Call):
            name = self.called(node)
            if name in ("ceil", "floor", "int", "round", "float", "abs", "trunc") and node.args:
                return self._growth(node.args[0], seen, depth + 1)
            if name in ("max", "min") and len(node.args) > 1:
                parts = [each for each in node.args if not isinstance(each, ast.Constant)]
                return _either([self._growth(each, seen, depth + 1) for each in parts])
        found = _either([self._growth(value, seen, depth + 1) for value in self._growth_steps(node)])
        return found if found != Growth() else Growth(bases=frozenset({shown(node)}))

    def _growth_steps(self, node: ast.expr) -> list[ast.expr]:
        """One step back, or to the origins where only a part of a value is taken; none where that is not plain."""
        steps = self._steps(node, ()) or []
        if not any(keys for _, keys in steps):
            return [value for value, _ in steps]
        origins = self.origins(node)
        return [] if any(origin.keys for origin in origins) else [origin.node for origin in origins]

    def _binary_growth(self, node: ast.BinOp, seen: frozenset[ast.AST], depth: int) -> Growth:
        left, right = self._growth(node.left, seen, depth), self._growth(node.right, seen, depth)
        if isinstance(node.op, ast.Mult):
            less, more = (left, right) if left.high < right.high else (right, left)
            again = less.high < 0 < more.low and not (more.bases & less.divisors)
            return Growth(
                left.low + right.low,
                left.high + right.high,
                left.remultiplied or right.remultiplied or again,
                left.bases | right.bases,
                left.divisors | right.divisors,
            )
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return Growth(
                left.low - right.high,
                left.high - right.low,
                left.remultiplied,
                left.bases,
                left.divisors | right.bases,
            )
        if isinstance(node.op, ast.Add | ast.Sub):
            sides = [
                side
                for side, part in ((left, node.left), (right, node.right))
                if not isinstance(part, ast.Constant) and (side.bases or side.low or side.high)
            ]
            return _either(sides)
        return Growth()

    def written(self, node: ast.expr | None) -> str:
        """An expression as text; of a mere name also what it stands for."""
        origins = self.origins(node)
        if isinstance(node, ast.Name) and len(origins) == 1 and origins[0].node is not node and not origins[0].keys:
            return f"{node.id} = {shown(origins[0].node)}"
        return shown(node)

    # --- loops and guards

    @cached_property
    def training_loops(self) -> list[TrainingLoop]:
        """The innermost loops in which gradients are computed and applied."""
        found = []
        for node in self.nodes:
            if isinstance(node, LOOPS):
                if self._trains(node) and not any(
                    isinstance(each, LOOPS) and self._trains(each) for each in self.inside(node.body)
                ):
                    found.append(TrainingLoop(node, node))
                elif not any(isinstance(each, LOOPS) for each in self.inside(node.body)):
                    found += [TrainingLoop(node, each) for each in self._step_functions(node)]
        return found

    def _trains(self, root: Loop | Function) -> bool:
        nodes = list(self.inside(root.body))
        return any(is_backward(node) for node in nodes) and any(is_step(node) for node in nodes)

    def loop_of(self, node: ast.AST) -> ast.AST | None:
        """The innermost loop around a node."""
        return next((each for each in self.ancestors(node) if isinstance(each, LOOPS)), None)

    def _step_functions(self, loop: Loop) -> list[Function]:
        functions = []
        for node in self.inside(loop.body):
            function = self.local_function(node) if isinstance(node, ast.Call) else None
            if function is not None and function not in functions and self._trains(function):
                if not any(isinstance(each, LOOPS) for each in self.inside(function.body)):
                    functions.append(function)
        return functions

    def every_step(self, loop: TrainingLoop) -> Iterator[ast.AST]:
        """What runs in every round of a training loop."""
        for node in self.inside(loop.root.body):
            if not self.is_guarded(node, loop.root):
                yield node
        if loop.root is not loop.node:
            for node in self.inside(loop.node.body):
                if not self.is_guarded(node, loop.node):
                    yield node

    def is_guarded(self, node: ast.AST, root: ast.AST) -> bool:
        """Whether something decides, other than the process' rank, if a node within root runs in a round."""
        child = node
        for parent in self.ancestors(node):
            if (
                isinstance(parent, ast.If | ast.IfExp)
                and child is not parent.test
                and not self.is_rank_test(parent.test)
            ):
                return True
            if isinstance(parent, ast.BoolOp) and child is not parent.values[0]:
                return True
            if isinstance(parent, ast.ExceptHandler | ast.match_case | ast.Lambda):
                return True
            if self._skipped_before(child, parent):
                return True
            if parent is root:
                return False
            if isinstance(parent, LOOPS) and child not in (
                getattr(parent, "iter", None),
                getattr(parent, "test", None),
            ):
                if not any(is_backward(each) for each in self.inside(parent.body)):
                    return True
            if isinstance(parent, ast.Try) and child in parent.orelse:
                return True
            child = parent
        return False

    def _skipped_before(self, child: ast.AST, parent: ast.AST) -> bool:
        for name in ("body", "orelse"):
            block = getattr(parent, name, None)
            if isinstance(block, list) and child in block:
                earlier = block[: block.index(child)]
                return any(
                    isinstance(each, ast.If)
                    and not self.is_rank_test(each.test)
                    and any(isinstance(leaf, ast.Continue | ast.Return) for leaf in self.inside(each.body))
                    for each in earlier
                )
        return False

    def is_rank_test(self, test: ast.expr) -> bool:
        """Whether a condition asks for nothing but the rank."""
        if isinstance(test, ast.BoolOp):
            return all(self.is_rank_test(each) for each in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_rank(test.operand) or self.is_rank_test(test.operand)
        if isinstance(test, ast.Call):
            return not test.args and method(test) in MAIN_NAMES
        if isinstance(test, ast.Compare):
            return self.is_rank(test.left) or any(self.is_rank(each) for each in test.comparators)
        return dotted(test).rpartition(".")[2] in MAIN_NAMES

    def on_main_only(self, node: ast.AST) -> ast.If | None:
        """The condition that lets only the first process of all reach a node, within its function."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, SCOPES):
                return None
            if isinstance(parent, ast.If) and child in parent.body and self._asks_for_main(parent.test):
                return parent
            child = parent
        return None

    def _asks_for_main(self, test: ast.expr) -> bool:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return any(self._asks_for_main(each) for each in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.is_rank(test.operand)
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            sides = (test.left, test.comparators[0])
            return any(self.is_rank(each) for each in sides) and any(
                isinstance(each, ast.Constant) and each.value == 0 for each in sides
            )
        if isinstance(test, ast.Call):
            return not test.args and method(test) in MAIN_NAMES
        return dotted(test).rpartition(".")[2] in MAIN_NAMES


class TrainingLoop(NamedTuple):
    """node: the loop. root: what holds the step; the loop itself, or a function that it calls."""

    node: Loop
    root: Loop | Function


def is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def is_step(node: ast.AST) -> bool:
    """Whether a call applies gradients: optimizer.step(), scaler.step(optimizer), engine.step()."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
        return False
    name = dotted(node.func.value).rpartition(".")[2].lower() or shown(node.func.value).lower()
    return not re.search(r"sched|prof|bar|warmup|ema", name)


def is_optimizer(node: ast.AST | None) -> bool:
    return "opt" in dotted(node).rpartition(".")[2].lower()


def _either(parts: list[Growth]) -> Growth:
    if not parts:
        return Growth()
    return Growth(
        min(each.low for each in parts),
        max(each.high for each in parts),
        all(each.remultiplied for each in parts),
        frozenset().union(*(each.bases for each in parts)),
        frozenset().union(*(each.divisors for each in parts)),
    )


def _texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
