"""Values of expressions. Parts that may not run are evaluated in doubt."""

import ast
import operator

from .values import (
    UNKNOWN,
    Const,
    Function,
    Mapping,
    Sequence,
    truth,
)

_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Expressions:
    """Mixin of the interpreter: what each kind of expression is worth."""

    def expression(self, node: ast.expr | None):
        """The value of an expression; reads of stubs in it are noted."""
        if node is None:
            return UNKNOWN
        method = getattr(self, f"of_{type(node).__name__}", None)
        if method is not None:
            return method(node)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.expression(part)
        return UNKNOWN

    def in_doubt(self, node: ast.expr):
        """Evaluates a part that may not run."""
        self.doubt += 1
        try:
            return self.expression(node)
        finally:
            self.doubt -= 1

    def of_Constant(self, node):
        return Const(node.value)

    def of_Name(self, node):
        return self.frame.scope.lookup(node.id)

    def of_Attribute(self, node):
        return self.read(self.expression(node.value), node.attr, node)

    def of_Call(self, node):
        return self.call(node)

    def of_Await(self, node):
        if isinstance(node.value, ast.Call):
            return self.call(node.value, runs=True)
        return self.expression(node.value)

    def of_Lambda(self, node):
        return Function(node, self.frame.scope.module, self.frame.scope)

    def of_NamedExpr(self, node):
        value = self.expression(node.value)
        self.bind(node.target, value)
        return value

    def of_Starred(self, node):
        self.expression(node.value)
        return UNKNOWN

    def of_Yield(self, node):
        value = self.expression(node.value)
        # What follows runs when the caller goes on, if it does.
        self.doubt += 1
        self.frame.yielded += 1
        del value
        return UNKNOWN

    of_YieldFrom = of_Yield

    def of_BoolOp(self, node):
        stops = isinstance(node.op, ast.Or)
        added, result = 0, UNKNOWN
        for index, part in enumerate(node.values):
            value = self.expression(part)
            known = truth(value)
            if known is stops:
                result = value if not added else UNKNOWN
                break
            if known is None:
                self.doubt += 1
                added += 1
            elif index == len(node.values) - 1 and not added:
                result = value
        self.doubt -= added
        return result

    def of_UnaryOp(self, node):
        value = self.expression(node.operand)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else Const(not known)
        if isinstance(node.op, ast.USub) and isinstance(value, Const):
            if isinstance(value.value, int | float):
                return Const(-value.value)
        return UNKNOWN

    def of_IfExp(self, node):
        known = truth(self.expression(node.test))
        if known is None:
            one, other = self.in_doubt(node.body), self.in_doubt(node.orelse)
            return one if self.same(one, other) else UNKNOWN
        return self.expression(node.body if known else node.orelse)

    def of_BinOp(self, node):
        left, right = self.expression(node.left), self.expression(node.right)
        work = _ARITHMETIC.get(type(node.op))
        if work and isinstance(left, Const) and isinstance(right, Const):
            try:
                return Const(work(left.value, right.value))
            except (TypeError, ValueError, ArithmeticError):
                return UNKNOWN
        if isinstance(node.op, ast.BitOr) and isinstance(left, Mapping):
            if isinstance(right, Mapping):
                return Mapping({**left.items, **right.items}, left.open or right.open)
        return UNKNOWN

    def of_Compare(self, node):
        left = self.expression(node.left)
        if len(node.ops) > 1:
            self.expression(node.comparators[0])
            for part in node.comparators[1:]:
                self.in_doubt(part)
            return UNKNOWN
        right, kind = self.expression(node.comparators[0]), node.ops[0]
        if isinstance(kind, ast.Is | ast.IsNot):
            return self._identity(left, right, isinstance(kind, ast.Is))
        if isinstance(kind, ast.In | ast.NotIn):
            return self._membership(left, right, isinstance(kind, ast.In))
        if isinstance(left, Const) and isinstance(right, Const):
            try:
                return Const(_COMPARE[type(kind)](left.value, right.value))
            except TypeError:
                return UNKNOWN
        return UNKNOWN

    @staticmethod
    def _identity(left, right, same: bool):
        if UNKNOWN in (left, right):
            return UNKNOWN
        plain = (None, True, False)
        if isinstance(left, Const) and isinstance(right, Const):
            if left.value in plain and right.value in plain:
                return Const((left.value is right.value) is same)
            one_plain = any(v is p for v in (left.value, right.value) for p in plain)
            return Const(not same) if one_plain else UNKNOWN
        if isinstance(left, Const) or isinstance(right, Const):
            other = right if isinstance(left, Const) else left
            # An imported name may be bound to None.
            known = truth(other) is not None or isinstance(other, Sequence | Mapping)
            return Const(not same) if known else UNKNOWN
        return UNKNOWN

    @staticmethod
    def _membership(left, right, inside: bool):
        if not isinstance(left, Const):
            return UNKNOWN
        if isinstance(right, Mapping) and not right.open:
            return Const((left.value in right.items) is inside)
        if isinstance(right, Sequence) and not right.open:
            if all(isinstance(each, Const) for each in right.items):
                return Const((left in right.items) is inside)
        return UNKNOWN

    def of_Tuple(self, node):
        items, is_open = [], False
        for part in node.elts:
            if isinstance(part, ast.Starred):
                inner = self.iterate(self.expression(part.value))
                items += inner or []
                is_open = is_open or inner is None
            else:
                items.append(self.expression(part))
        return Sequence(items, is_open)

    of_List = of_Tuple

    def of_Dict(self, node):
        result = Mapping({})
        for key, value in zip(node.keys, node.values, strict=True):
            worth = self.expression(value)
            if key is None:
                if isinstance(worth, Mapping):
                    result.items.update(worth.items)
                    result.open = result.open or worth.open
                else:
                    result.open = True
                continue
            name = self.expression(key)
            if isinstance(name, Const):
                result.items[name.value] = worth
            else:
                result.open = True
        return result

    def of_Subscript(self, node):
        owner, key = self.expression(node.value), self.expression(node.slice)
        if isinstance(owner, Mapping) and isinstance(key, Const):
            return owner.items.get(key.value, UNKNOWN)
        if isinstance(owner, Sequence) and isinstance(key, Const) and not owner.open:
            if isinstance(key.value, int):
                try:
                    return owner.items[key.value]
                except IndexError:
                    return UNKNOWN
        return UNKNOWN

    def of_ListComp(self, node):
        return self._comprehension(node, [node.elt], lazy=False)

    def of_SetComp(self, node):
        self._comprehension(node, [node.elt], lazy=False)
        return UNKNOWN

    def of_GeneratorExp(self, node):
        return self._comprehension(node, [node.elt], lazy=True)

    def of_DictComp(self, node):
        self._comprehension(node, [node.key, node.value], lazy=False)
        return UNKNOWN

    def _comprehension(self, node, results, *, lazy: bool):
        """Known items are followed one by one, others once and in doubt."""
        first = node.generators[0]
        items = self.iterate(self.expression(first.iter))
        simple = len(node.generators) == 1 and not first.ifs
        before = dict(self.frame.scope.names)
        try:
            if simple and items is not None and len(items) <= 32:
                # A generator may be left before its end.
                self.doubt += lazy
                found = []
                for item in items:
                    self.bind(first.target, item)
                    found.append([self.expression(part) for part in results][0])
                self.doubt -= lazy
                return Sequence(found)
            self.doubt += 1
            for index, generator in enumerate(node.generators):
                if index:
                    self.expression(generator.iter)
                self.bind(generator.target, UNKNOWN)
                for condition in generator.ifs:
                    self.expression(condition)
            for part in results:
                self.expression(part)
            self.doubt -= 1
            return UNKNOWN
        finally:
            self.frame.scope.names = before

    def iterate(self, value) -> list | None:
        """What a loop over the value yields; None when that is not known."""
        if isinstance(value, Sequence) and not value.open:
            return list(value.items)
        if isinstance(value, Mapping) and not value.open:
            return [Const(key) for key in value.items]
        return None
