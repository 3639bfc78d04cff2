"""fixture_drift on small checkouts: what it finds, and what it keeps quiet about."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fixture_drift
from driftlib.suite import Suite

SCRIPTS = Path(__file__).resolve().parents[1]

REGISTER = """
from sglang.test.ci.ci_register import register_cpu_ci
register_cpu_ci(est_time=1, suite="base-a-test-cpu")
"""
HEAD = f"""
import asyncio, contextlib, copy, functools, types, unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch
from engine import work as module
from engine.work import *
from engine.work import Real, Runner, config, helper, work
{REGISTER}
"""
# What every sample's production module has besides its own function.
SUPPORT = """
import contextlib, logging
from typing import Protocol
from engine.other import helper
logger = logging.getLogger(__name__)
def config():
    return read_configuration()
class Real:
    b = 1
class Runner:
    pass
class Shape(Protocol):
    a: int
class Reader:
    def __init__(self, y):
        self.y = y.b
"""
OTHER = """
def helper(y):
    return y.b
def set_b(y):
    y.b = 1
"""


def checkout(root, production, test, *, register=True):
    """A checkout with one production module and one registered test."""
    package = root / "python" / "engine"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text(OTHER)
    (package / "work.py").write_text(SUPPORT + textwrap.dedent(production))
    folder = root / "test" / "registered"
    folder.mkdir(parents=True, exist_ok=True)
    head = HEAD if register else HEAD.replace(REGISTER, "")
    (folder / "test_sample.py").write_text(head + textwrap.dedent(test))
    return root


def found(root):
    """Attributes that are reported as lacking."""
    suite = Suite(root, [root / "python"])
    for path in sorted((root / "test").rglob("test_*.py")):
        suite.follow(path)
    return sorted(finding.attribute for finding in suite.findings)


CALL = """
class T(unittest.TestCase):
    def test_it(self):
        work(SimpleNamespace(a=1, on=True, off=False, inner=SimpleNamespace(c=2)))
"""


def in_test(body):
    """A test method with this body."""
    return "class T(unittest.TestCase):\n    def test_it(self):\n" + textwrap.indent(
        textwrap.dedent(body), " " * 8
    )


# name: (what `work(x)` does, test). Every one must stay quiet about `b`.
QUIET = {
    "getattr with a default": ("getattr(x, 'b', None)", CALL),
    "hasattr": ("if hasattr(x, 'b'):\n    x.b", CALL),
    "hasattr, early return": ("if not hasattr(x, 'b'):\n    return\nx.b", CALL),
    "hasattr in a conjunction": ("if config() and hasattr(x, 'b'):\n    x.b", CALL),
    "except AttributeError": ("try:\n    x.b\nexcept AttributeError:\n    pass", CALL),
    "except Exception": ("try:\n    x.b\nexcept (ValueError, Exception):\n    0", CALL),
    "bare except": ("try:\n    x.b\nexcept:\n    pass", CALL),
    "suppress": ("with contextlib.suppress(AttributeError):\n    x.b", CALL),
    "unknown condition": ("if config():\n    x.b", CALL),
    "unknown condition, else": ("if config():\n    pass\nelse:\n    x.b", CALL),
    "early return": ("if config():\n    return 0\nx.b", CALL),
    "early return in a loop": ("for i in config():\n    return 0\nx.b", CALL),
    "early return in an inner block": (
        "with config():\n    if config():\n        return 0\nx.b",
        CALL,
    ),
    "return in a handler": (
        "try:\n    config()\nexcept ImportError:\n    return 0\nx.b",
        CALL,
    ),
    "after an endless return": ("return 0\nx.b", CALL),
    "after a raise": ("raise NotImplementedError\nx.b", CALL),
    "known flag": ("if x.off:\n    x.b", CALL),
    "known flag, inverted": ("if not x.on:\n    x.b", CALL),
    "known number": ("if x.a == 2:\n    x.b", CALL),
    "known None": ("y = None\nif y is not None:\n    x.b", CALL),
    "and, unknown": ("config() and x.b", CALL),
    "and, known": ("x.off and x.b", CALL),
    "or, known": ("x.a or x.b", CALL),
    "conditional expression": ("0 if config() else x.b", CALL),
    "chained comparison": ("0 < config() < x.b", CALL),
    "isinstance": ("if isinstance(x, Real):\n    x.b", CALL),
    "isinstance of an unknown class": ("if isinstance(x, config()):\n    x.b", CALL),
    "not an instance of an unknown class": (
        "if not isinstance(x, config()):\n    x.b",
        CALL,
    ),
    "not an instance of a protocol": (
        "if not isinstance(x, Shape):\n    x.b",
        CALL,
    ),
    "loop over the unknown": ("for i in config():\n    x.b", CALL),
    "break before the read": (
        "for i in (1, 2):\n    if config():\n        break\n    x.b",
        CALL,
    ),
    "continue before the read": (
        "for i in (1, 2):\n    if config():\n        continue\n    x.b",
        CALL,
    ),
    "break before a later round": (
        "for i in (1, 2):\n    if i == 2:\n        x.b\n    if config():\n        break",
        CALL,
    ),
    "empty loop": ("for i in ():\n    x.b", CALL),
    "while": ("while config():\n    x.b", CALL),
    "comprehension": ("[x.b for i in config()]", CALL),
    "comprehension with a condition": ("[x.b for i in (1, 2) if config()]", CALL),
    "generator expression": ("any(x.b for i in (1, 2))", CALL),
    "match": ("match config():\n    case 1:\n        x.b", CALL),
    "lambda that is not called": ("y = lambda: x.b", CALL),
    "inner function that is not called": ("def y():\n    return x.b", CALL),
    "assert message": ("assert config(), x.b", CALL),
    "handler": ("try:\n    config()\nexcept ValueError:\n    x.b", CALL),
    "set in production": ("x.b = 1\nx.b", CALL),
    "set in production, perhaps": ("if config():\n    x.b = 1\nx.b", CALL),
    "set by a helper": ("from engine.other import set_b\nset_b(x)\nx.b", CALL),
    "handed to a library": ("import lib\nlib.prepare(x)\nx.b", CALL),
    "handed to the unknown": ("config()(x)\nx.b", CALL),
    "vars": ("vars(x).update(b=1)\nx.b", CALL),
    "__dict__": ("x.__dict__['b'] = 1\nx.b", CALL),
    "object.__setattr__": ("object.__setattr__(x, 'b', 1)\nx.b", CALL),
    "__setattr__": ("x.__setattr__('b', 1)\nx.b", CALL),
    "__setattr__ of its class": (
        "from types import SimpleNamespace as S\nS.__setattr__(x, 'b', 1)\nx.b",
        CALL,
    ),
    "__init__ again": ("x.__init__(b=1)\nx.b", CALL),
    "setattr with a computed name": ("setattr(x, config(), 1)\nx.b", CALL),
    "a copy with more": ("import copy\ny = copy.copy(x)\ny.b = 1\ny.b", CALL),
    "a stub of production's own": (
        "from types import SimpleNamespace as S\ny = S(a=1)\nif config():\n"
        "    y.b = 1\ny.c",
        CALL,
    ),
    "dunder": ("x.__class__.__name__", CALL),
    "unknown name bound over the stub": ("x = config()\nx.b", CALL),
    "rebound in a branch": ("if config():\n    x = config()\nx.b", CALL),
    "rebound in the other branch": (
        "if config():\n    pass\nelse:\n    x = config()\nx.b",
        CALL,
    ),
    "attribute replaced in a branch": (
        "if config():\n    x.inner = config()\nx.inner.b",
        CALL,
    ),
    "recursion": ("if config():\n    work(x)\n    x.b", CALL),
    "set later in the test": (
        "x.b",
        in_test("s = SimpleNamespace(a=1)\ns.b = 2\nwork(s)"),
    ),
    "set with setattr": (
        "x.b",
        in_test(
            "s = SimpleNamespace()\nfor n in ('a', 'b'):\n    setattr(s, n, 1)\nwork(s)"
        ),
    ),
    "set by a helper of the test": (
        "x.b",
        "def fill(s):\n    s.b = 1\n"
        + in_test("s = SimpleNamespace()\nfill(s)\nwork(s)"),
    ),
    "set by a thread": (
        "x.b",
        "import threading\n"
        + in_test(
            "s = SimpleNamespace(a=1)\ndef fill():\n    s.b = 1\n"
            "t = threading.Thread(target=fill)\nt.start()\nt.join()\nwork(s)"
        ),
    ),
    "set by a thread through a helper": (
        "x.b",
        "import threading\ndef fill(s):\n    s.b = 1\n"
        + in_test(
            "s = SimpleNamespace(a=1)\n"
            "threading.Thread(target=lambda: fill(s)).run()\nwork(s)"
        ),
    ),
    "set by a callback": (
        "x.b",
        in_test(
            "s, r = SimpleNamespace(a=1), config()\n"
            "r.cb = lambda: setattr(s, 'b', 1)\nr.go()\nwork(s)"
        ),
    ),
    "set by a callback of an object that another runs": (
        "x.b",
        in_test(
            "s, r = SimpleNamespace(a=1), SimpleNamespace()\n"
            "r.cb = lambda: setattr(s, 'b', 1)\nconfig().go(r)\nwork(s)"
        ),
    ),
    "set by a method that another runs": (
        "x.b",
        in_test(
            "s = SimpleNamespace(a=1)\nclass R:\n    def cb(self):\n"
            "        s.b = 1\nconfig().go(R())\nwork(s)"
        ),
    ),
    "set by map": (
        "x.b",
        in_test(
            "s = SimpleNamespace(a=1)\n"
            "list(map(lambda k: setattr(s, k, 1), ['b']))\nwork(s)"
        ),
    ),
    "set by map on its items": (
        "x.b",
        "def fill(s):\n    s.b = 1\n"
        + in_test("s = SimpleNamespace(a=1)\nlist(map(fill, [s]))\nwork(s)"),
    ),
    "set by a decorated function": (
        "x.b",
        in_test(
            "s = SimpleNamespace(a=1)\n@config()\ndef fill():\n    s.b = 1\nwork(s)"
        ),
    ),
    "set on a global by a helper": (
        "x.b",
        "S = SimpleNamespace(a=1)\ndef fill():\n    S.b = 1\n"
        + in_test("fill()\nwork(S)"),
    ),
    "MagicMock": ("x.b", in_test("work(MagicMock(a=1))")),
    "Mock attribute": ("x.inner.b", in_test("work(SimpleNamespace(inner=Mock()))")),
    "keywords nobody knows": ("x.b", in_test("work(SimpleNamespace(**config()))")),
    "keywords from a dict": (
        "x.b",
        in_test("v = dict(a=1)\nv.update(b=2)\nwork(SimpleNamespace(**v))"),
    ),
    "keywords through a helper": (
        "x.b",
        "def make(**more):\n    return SimpleNamespace(**{'a': 1, **more})\n"
        + in_test("work(make(b=3))"),
    ),
    "subclass of SimpleNamespace": (
        "x.b",
        "class S(SimpleNamespace):\n    b = 1\n" + in_test("work(S(a=1))"),
    ),
    "a class of the test": ("x.b", "class S:\n    b = 1\n" + in_test("work(S())")),
    "an expected error": (
        "x.b",
        in_test("with self.assertRaises(AttributeError):\n    work(SimpleNamespace())"),
    ),
    "patch.object on the stub": (
        "x.b",
        in_test(
            "s = SimpleNamespace()\n"
            "with patch.object(s, 'b', 1, create=True):\n    work(s)"
        ),
    ),
    "patched helper": (
        "helper(x)",
        in_test("with patch.object(module, 'helper'):\n    work(SimpleNamespace())"),
    ),
    "patched helper by path": (
        "helper(x)",
        "@patch('engine.work.helper')\n" + in_test("work(SimpleNamespace())"),
    ),
    "patched helper by a computed path": (
        "helper(x)",
        "WHERE = 'engine.work'\n@patch(f'{WHERE}.helper')\n"
        + in_test("work(SimpleNamespace())"),
    ),
    "patched helper by a name from a list": (
        "helper(x)",
        in_test(
            "for name in ('config', 'helper'):\n"
            "    p = patch.object(module, name)\n    p.start()\n"
            "work(SimpleNamespace())"
        ),
    ),
    "patched class": (
        "Reader(x)",
        in_test("with patch.object(module, 'Reader'):\n    work(SimpleNamespace())"),
    ),
    "replaced helper": (
        "helper(x)",
        in_test("module.helper = lambda y: 0\nwork(SimpleNamespace())"),
    ),
    "skipped test": (
        "x.b",
        "@unittest.skip('no')\n" + in_test("work(SimpleNamespace())"),
    ),
    "skipped method": (
        "x.b",
        in_test("work(SimpleNamespace())").replace(
            "    def", "    @unittest.skip('no')\n    def"
        ),
    ),
    "expected failure": (
        "x.b",
        in_test("work(SimpleNamespace())").replace(
            "    def", "    @unittest.expectedFailure\n    def"
        ),
    ),
    "xfail": (
        "x.b",
        "import pytest\n@pytest.mark.xfail(reason='no')\n"
        "def test_it():\n    work(SimpleNamespace())\n",
    ),
    "skipped module": (
        "x.b",
        "import pytest\npytestmark = [pytest.mark.skip(reason='no')]\n"
        + in_test("work(SimpleNamespace())"),
    ),
    "a call in a branch of the test that is not taken": (
        "x.b",
        in_test("if False:\n    work(SimpleNamespace())"),
    ),
    "production not called": ("x.b", in_test("self.s = SimpleNamespace(a=1)")),
    "read by the test itself": ("0", in_test("s = SimpleNamespace()\nwork(s)\ns.b")),
    "the stub's own lambda": (
        "x.f()",
        in_test("s = SimpleNamespace()\ns.f = lambda: s.b\nwork(s)"),
    ),
}
WHOLE = {
    "generator that is not consumed": "def work(x):\n    yield x.b\n",
    "coroutine that is not awaited": "async def work(x):\n    x.b\n",
    "unknown decorator": "@config\ndef work(x):\n    x.b\n",
    "context manager that is not entered": (
        "@contextlib.contextmanager\ndef work(x):\n    x.b\n    yield\n"
    ),
    "bound twice": "def work(x):\n    x.b\nif config():\n    def work(x):\n        0\n",
}


def production(body):
    return "def work(x):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"


@pytest.mark.parametrize("name", QUIET)
def test_quiet(tmp_path, name):
    body, test = QUIET[name]
    assert found(checkout(tmp_path, production(body), test)) == []


# Samples whose test never reaches the function, replaces what it is given, or hands
# it to code that is not followed.
UNREACHED = {
    "set by a thread",
    "set by a thread through a helper",
    "set by a callback",
    "set by a callback of an object that another runs",
    "set by a method that another runs",
    "set by map",
    "set by map on its items",
    "set by a decorated function",
    "an expected error",
    "a class of the test",
    "subclass of SimpleNamespace",
    "MagicMock",
    "keywords nobody knows",
    "skipped test",
    "skipped method",
    "skipped module",
    "expected failure",
    "xfail",
    "a call in a branch of the test that is not taken",
    "production not called",
}


@pytest.mark.parametrize("name", [name for name in QUIET if name not in UNREACHED])
def test_quiet_samples_are_followed(tmp_path, name):
    """Quiet for the right reason: a read in front of the guarded one is found."""
    body, test = QUIET[name]
    root = checkout(tmp_path, production("x.canary\n" + body), test)
    assert found(root) == ["canary"]


@pytest.mark.parametrize("name", WHOLE)
def test_quiet_about_calls_that_run_nothing_or_who_knows_what(tmp_path, name):
    test = in_test("work(SimpleNamespace())")
    assert found(checkout(tmp_path, WHOLE[name], test)) == []


# name: (what `work(x)` does, test). Every one lacks exactly `b`.
LOUD = {
    "direct": ("x.b", CALL),
    "nested": ("x.inner.b", CALL),
    "getattr": ("getattr(x, 'b')", CALL),
    "f-string": ("f'{x.b}'", CALL),
    "augmented": ("x.b += 1", CALL),
    "called": ("x.b(1)", CALL),
    "handed on": ("helper(x)", CALL),
    "handed to a constructor": ("Reader(x)", CALL),
    "handed on by name": ("helper(y=x.inner)", CALL),
    "handed on in an import of its own": (
        "from engine.other import helper as h\nreturn h(x)",
        CALL,
    ),
    "alias": ("y = x\nz = y\nz.b", CALL),
    "first of a conjunction": ("x.b and config()", CALL),
    "second of a conjunction": ("x.on and x.b", CALL),
    "second of a disjunction": ("x.off or x.b", CALL),
    "not": ("if not (x.b and getattr(x, 'z', 0) == 0):\n    config()", CALL),
    "known flag": ("if x.on:\n    x.b", CALL),
    "known flag, else": ("if x.off:\n    0\nelif not x.off:\n    x.b", CALL),
    "known comparison": ("if x.a == 1 and x.a in (1, 2):\n    x.b", CALL),
    "condition": ("if x.b:\n    0", CALL),
    "after a raise that may happen": ("if config():\n    raise ValueError\nx.b", CALL),
    "after an assertion": ("assert config()\nx.b", CALL),
    "after a branch": ("if config():\n    config()\nx.b", CALL),
    "not an AttributeError": ("try:\n    x.b\nexcept ValueError:\n    0", CALL),
    "finally": ("try:\n    config()\nfinally:\n    x.b", CALL),
    "else of a try": ("try:\n    0\nexcept ValueError:\n    0\nelse:\n    x.b", CALL),
    "with": ("with config(x.b):\n    0", CALL),
    "literal loop": ("for y in [x, x.inner]:\n    y.b", CALL),
    "comprehension over a literal": ("[y.b for y in (x,)]", CALL),
    "iterable": ("for y in x.b:\n    0", CALL),
    "inner function that is called": ("def y():\n    return x.b\ny()", CALL),
    "lambda that is called": ("(lambda y: y.b)(x)", CALL),
    "isinstance says no": ("if not isinstance(x, Real):\n    x.b", CALL),
    "hasattr says yes": ("if hasattr(x, 'a'):\n    x.b", CALL),
    "hasattr says no": ("if not hasattr(x, 'z'):\n    x.b", CALL),
    "a copy that got it": ("import copy\ny = copy.copy(x)\ny.b = 1\nx.b", CALL),
    "guarded elsewhere": ("getattr(x, 'b', 0)\nx.b", CALL),
    "another stub set by a thread": (
        "x.b",
        in_test(
            "import threading\ns, o = SimpleNamespace(a=1), SimpleNamespace()\n"
            "def fill():\n    o.b = 1\nthreading.Thread(target=fill).run()\nwork(s)"
        ),
    ),
    "a callback that only reads": (
        "x.b",
        in_test("s, r = SimpleNamespace(a=1), config()\nr.cb = lambda: s.a\nwork(s)"),
    ),
    "map without the stub": (
        "x.b",
        in_test(
            "s = SimpleNamespace(a=1)\nlist(map(lambda k: k.upper(), ['b']))\nwork(s)"
        ),
    ),
    "deleted": ("x.b", in_test("s = SimpleNamespace(b=1)\ndel s.b\nwork(s)")),
    "two calls, the second without": (
        "x.b",
        in_test("work(SimpleNamespace(b=1))\nwork(SimpleNamespace(a=1))"),
    ),
    "known keywords": (
        "x.b",
        "def make(**more):\n    v = {'a': 1}\n    v.update(more)\n"
        "    return SimpleNamespace(**v)\n" + in_test("work(make(c=3))"),
    ),
    "made in setUp": (
        "x.b",
        "class T(unittest.TestCase):\n    def setUp(self):\n"
        "        self.s = SimpleNamespace(a=1)\n"
        "    def test_it(self):\n        work(self.s)\n",
    ),
    "made at the top": ("x.b", "S = SimpleNamespace(a=1)\n" + in_test("work(S)")),
    "made by a method": (
        "x.b",
        "class T(unittest.TestCase):\n    def make(self):\n"
        "        return SimpleNamespace(a=1)\n"
        "    def test_it(self):\n        work(self.make())\n",
    ),
    "types.SimpleNamespace": ("x.b", in_test("work(types.SimpleNamespace(a=1))")),
    "through the module": ("x.b", in_test("module.work(SimpleNamespace(a=1))")),
    "a function, no class": ("x.b", "def test_it():\n    work(SimpleNamespace())\n"),
    "in a subtest": (
        "x.b",
        in_test(
            "for v in config():\n"
            "    with self.subTest(v):\n        work(SimpleNamespace())"
        ),
    ),
    "as the value of an assertion": (
        "x.b",
        in_test("self.assertEqual(work(SimpleNamespace(a=1)), 1)"),
    ),
    "partial": ("x.b", in_test("functools.partial(work, SimpleNamespace())()")),
    "a stub's lambda that production hands a stub": (
        "x.f(x)\nx.b",
        in_test("work(SimpleNamespace(f=lambda y: 0))"),
    ),
}


@pytest.mark.parametrize("name", LOUD)
def test_found(tmp_path, name):
    body, test = LOUD[name]
    assert found(checkout(tmp_path, production(body), test)) == ["b"]


METHODS = """
import dataclasses
@dataclasses.dataclass
class Held:
    inner: object
    size: int = 0
class Base:
    def __init__(self, owner):
        self.owner = owner
        self.flag = False
    def base_read(self):
        return self.owner.b
class Worker(Base):
    kind = "x"
    def __init__(self, owner):
        super().__init__(owner)
        self.ready = True
    @property
    def inner(self):
        return self.owner.inner
    def by_property(self):
        return self.inner.b
    def inherited(self):
        return self.base_read()
    def held(self):
        return self.use(Held(self.owner, size=3))
    def use(self, held):
        return held.inner.b
    def skipped(self):
        if self.flag:
            return self.owner.b
    def unknown_attribute(self):
        if self.elsewhere:
            return self.owner.b
    @staticmethod
    def alone(y):
        return y.b
    @classmethod
    def of_class(cls, y):
        return y.b
    def by_kind(self):
        if self.kind == "x":
            return self.owner.b
    async def later(self):
        return self.owner.b
class Reading(Base):
    def __init__(self, owner):
        super().__init__(owner.b)
"""
OWNER = "o = SimpleNamespace(a=1, inner=SimpleNamespace())\n"
MADE = OWNER + "w = Worker(o)\n"
BARE = OWNER + "w = Worker.__new__(Worker)\nw.owner = o\nw.flag = False\n"


@pytest.mark.parametrize(
    "lines, lacks",
    [
        (MADE + "w.by_property()", ["b"]),
        (MADE + "w.inherited()", ["b"]),
        (MADE + "w.held()", ["b"]),
        (MADE + "w.by_kind()", ["b"]),
        (MADE + "w.skipped()", []),
        (MADE + "w.unknown_attribute()", []),
        (MADE + "w.flag = True\nw.skipped()", ["b"]),
        (MADE + "w.of_class(o)", ["b"]),
        (MADE + "w.later()", []),
        (BARE + "w.by_property()", ["b"]),
        (BARE + "w.inherited()", ["b"]),
        (BARE + "w.skipped()", []),
        (OWNER + "Worker.alone(o)", ["b"]),
        (OWNER + "Reading(o)", ["b"]),
        # A stub as self: its missing methods are missing too.
        (OWNER + "Worker.inherited(o)", ["base_read"]),
        (OWNER + "Worker.inherited(SimpleNamespace(base_read=lambda: 1))", []),
        ("s = SimpleNamespace(owner=SimpleNamespace())\nBase.base_read(s)", ["b"]),
        (OWNER + "types.MethodType(Base.base_read, SimpleNamespace(owner=o))()", ["b"]),
        (
            "s = SimpleNamespace(owner=SimpleNamespace())\n"
            "s.base_read = Base.base_read.__get__(s)\nWorker.inherited(s)",
            ["b"],
        ),
    ],
)
def test_methods_and_what_they_are_called_on(tmp_path, lines, lacks):
    imports = "from engine.work import Base, Reading, Worker\n"
    root = checkout(tmp_path, METHODS, imports + in_test(lines))
    assert found(root) == lacks


def test_an_awaited_coroutine(tmp_path):
    test = """
    from engine.work import Worker
    class T(unittest.IsolatedAsyncioTestCase):
        async def test_it(self):
            await Worker(SimpleNamespace(a=1)).later()
    """
    assert found(checkout(tmp_path, METHODS, test)) == ["b"]


# The two bugs of sgl-project/sglang pull request 47653's CI, in form.

AUTOTUNE = """
from engine.environ import envs
def cache_path(runner):
    return runner.not_in_the_stub
def skip_ops(runner):
    return set()
def may_seed(runner, chunk):
    # Read by the startup guard that the pull request added.
    if runner.is_draft_worker:
        return False
    return runner.model_config.hf_config.kind == "k3"
@contextlib.contextmanager
def autotune_context(runner, *, run_lm_head):
    mr = runner
    path = cache_path(mr)
    reuse = envs.AUTOTUNE_CACHE.get()
    if reuse:
        cache = path
    else:
        cache = path.parent / "runs"
    mr.forward_stream.wait()
    with device(mr.device).stream(mr.forward_stream):
        tuner = make_tuner()
        if reuse and may_seed(mr, 16384):
            tuner.load(bundle())
        yield
        if reuse:
            tuner.save(str(cache))
"""
PHASES = """
from engine import work as autotune
class TestAutotuneCachePhases(unittest.TestCase):
    def test_target_and_draft_cache_reuse(self):
        runner = SimpleNamespace(
            device="cuda",
            forward_stream=make_stream(),
            tp_group=SimpleNamespace(world_size=1),
            FIELD
        )
        with temporary() as directory:
            with (
                patch.object(autotune, "cache_path", side_effect=[1, 2, 3]),
                patch.object(autotune, "skip_ops", return_value=set()),
                autotune.envs.AUTOTUNE_CACHE.override(True),
            ):
                with autotune.autotune_context(runner, run_lm_head=False):
                    self.assertTrue(directory)
                runner.is_draft_worker = True
                with autotune.autotune_context(runner, run_lm_head=False):
                    pass
"""


def test_the_seed_s_autotune_stub(tmp_path):
    root = checkout(tmp_path, AUTOTUNE, PHASES.replace("FIELD", ""))
    (root / "python" / "engine" / "environ.py").write_text("envs = load()\n")
    suite = Suite(root, [root / "python"])
    suite.follow(root / "test" / "registered" / "test_sample.py")
    by_name = {each.attribute: each for each in suite.findings}
    # model_config is read on the way only when the runner is no draft worker.
    assert set(by_name) == {"is_draft_worker"}
    finding = by_name["is_draft_worker"]
    lines = (root / "python" / "engine" / "work.py").read_text().splitlines()
    assert "if runner.is_draft_worker" in lines[finding.line - 1]
    assert finding.path == "python/engine/work.py"
    assert finding.function == "may_seed"
    tests = (root / finding.test).read_text().splitlines()
    assert "runner = SimpleNamespace(" in tests[finding.stub_line - 1]
    assert "autotune_context(runner" in tests[finding.call_line - 1]


def test_the_seed_s_autotune_stub_repaired(tmp_path):
    test = PHASES.replace("FIELD", "is_draft_worker=True,")
    root = checkout(tmp_path, AUTOTUNE, test)
    (root / "python" / "engine" / "environ.py").write_text("envs = load()\n")
    assert found(root) == []
    # Without cache reuse the guard is not reached.
    off = PHASES.replace("FIELD", "").replace("override(True)", "override(False)")
    assert found(checkout(tmp_path, AUTOTUNE, off)) == []


PREFILL = """
class PrefillRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
    def prepare_for_replay(self, batch, static, key):
        backend = self.model_runner.attn_backend
        built = False
        if self._is_full:
            backend.init_out_graph(static.padded(self.slots))
        elif not self.captured_metadata:
            if not (
                backend.skips_idle and getattr(batch, "non_padded", None) == 0
            ):
                backend.init_forward_metadata(batch)
                built = True
        else:
            backend.refresh(self.buffers[key], batch)
        return backend.resolve(batch, size=key.size, built=built)
"""
REPLAY = """
from engine.work import PrefillRunner
def _runner(full):
    runner = PrefillRunner.__new__(PrefillRunner)
    runner._is_full = full
    runner.captured_metadata = False
    runner.buffers = {}
    return runner
class TestReplay(unittest.TestCase):
    def test_replay_reuses_the_buffer(self):
        runner = _runner(FULL)
        attn_backend = SimpleNamespace(
            pool=SimpleNamespace(size=8),
            init_forward_metadata=lambda batch: None,
            resolve=lambda batch, size, built: None,
            FIELD
        )
        runner.model_runner = SimpleNamespace(
            attn_backend=attn_backend, kv_cache_dtype=None, device="cpu"
        )
        live = SimpleNamespace(batch_size=1)
        runner.prepare_for_replay(live, SimpleNamespace(), SimpleNamespace(size=8))
"""


def test_the_seed_s_nested_backend_stub(tmp_path):
    test = REPLAY.replace("FULL", "False")
    root = checkout(tmp_path, PREFILL, test.replace("FIELD", ""))
    suite = Suite(root, [root / "python"])
    suite.follow(root / "test" / "registered" / "test_sample.py")
    [finding] = suite.findings
    assert finding.attribute == "skips_idle"
    assert finding.function == "PrefillRunner.prepare_for_replay"
    tests = (root / finding.test).read_text().splitlines()
    assert "attn_backend = SimpleNamespace(" in tests[finding.stub_line - 1]
    repaired = test.replace("FIELD", "skips_idle=False,")
    assert found(checkout(tmp_path, PREFILL, repaired)) == []
    # On the full path other things are read, and skips_idle is not.
    full = REPLAY.replace("FULL", "True").replace("FIELD", "")
    assert found(checkout(tmp_path, PREFILL, full)) == ["init_out_graph", "padded"]


SGLANG_REPLAY = """
import unittest
from types import SimpleNamespace
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
    PrefillCudaGraphRunner,
)
from sglang.srt.model_executor.runner.shape_key import ShapeKey
REGISTER
class T(unittest.TestCase):
    def test_replay(self):
        runner = PrefillCudaGraphRunner.__new__(PrefillCudaGraphRunner)
        runner._is_full_backend = False
        runner.use_captured_attn_metadata = False
        attn_backend = SimpleNamespace(
            init_forward_metadata=lambda batch: None,
            resolve_prefill_shared_read_ends=lambda batch, **kwargs: None,
            FIELD
        )
        runner.model_runner = SimpleNamespace(attn_backend=attn_backend, device="cpu")
        batch = SimpleNamespace(batch_size=1)
        runner._prepare_forward_metadata_for_replay(batch, batch, ShapeKey(size=8))
"""


def sglang_checkout(root):
    """A checkout whose package is the installed engine; None without one."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no sglang installed")
    (root / "python").mkdir(parents=True)
    (root / "python" / "sglang").symlink_to(spec.submodule_search_locations[0])
    (root / "test" / "registered").mkdir(parents=True)
    return root


def test_the_nested_backend_stub_against_the_real_engine(tmp_path):
    root = sglang_checkout(tmp_path)
    path = root / "test" / "registered" / "test_replay.py"
    text = SGLANG_REPLAY.replace("REGISTER", REGISTER)
    path.write_text(text.replace("FIELD", ""))
    assert found(root) == ["skips_prefill_metadata_on_idle_dp_rank"]
    path.write_text(
        text.replace("FIELD", "skips_prefill_metadata_on_idle_dp_rank=True,")
    )
    assert found(root) == []


SGLANG_AUTOTUNE = """
import unittest
from types import SimpleNamespace
from sglang.srt.model_executor.runner import flashinfer_autotune as autotune
REGISTER
class T(unittest.TestCase):
    def test_context(self):
        runner = SimpleNamespace(
            device="cuda",
            dtype="bfloat16",
            forward_stream=make_stream(),
            model_config=SimpleNamespace(hf_config=object(), quantization=None),
            FIELD
        )
        with autotune.envs.SGLANG_FLASHINFER_AUTOTUNE_CACHE.override(True):
            with autotune.flashinfer_autotune_context(runner, run_lm_head=False):
                pass
"""


def test_the_autotune_stub_against_the_real_engine(tmp_path):
    root = sglang_checkout(tmp_path)
    path = root / "test" / "registered" / "test_autotune.py"
    text = SGLANG_AUTOTUNE.replace("REGISTER", REGISTER)
    path.write_text(text.replace("FIELD", ""))
    assert found(root) == ["is_draft_worker"]
    path.write_text(text.replace("FIELD", "is_draft_worker=False,"))
    assert found(root) == []


# The command line.


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "fixture_drift.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_line(tmp_path):
    root = checkout(tmp_path, production("x.b"), CALL)
    done = run(root)
    assert done.returncode == 1
    tests = (root / "test/registered/test_sample.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(tests) if "SimpleNamespace(a=1" in text)
    source = (root / "python/engine/work.py").read_text().splitlines()
    read = 1 + source.index("    x.b")
    assert done.stdout.splitlines()[0] == (
        f"test/registered/test_sample.py:{line}: the stub lacks 'b', which"
        f" python/engine/work.py:{read} (work) reads; called from line {line}"
    )
    assert "1 findings in 1 tests of 1 registered files" in done.stdout
    (root / "python/engine/work.py").write_text(production("x.a"))
    assert run(root).returncode == 0


CALLED_FROM = """
def make():
    return SimpleNamespace(a=int("1"))
def start(s):
    work(s)  # in the helper
"""


@pytest.mark.parametrize(
    "body, line",
    [
        ("work(make())", "work(make())"),
        ("work(\n    make(),\n)", "work("),
        ("s = make()\nint('1')\nwork(s)", "work(s)"),
        ("start(make())", "work(s)  # in the helper"),
        ("s = make()\nr = Shown(s)\nint('1')\nself.x = r.shown", "self.x = r.shown"),
    ],
)
def test_the_line_that_called(tmp_path, body, line):
    """The call of production code, not the helper that made the stub."""
    shown = """
    class Shown:
        def __init__(self, y):
            self.y = y
        @property
        def shown(self):
            return self.y.b
    """
    code = production("x.b") + textwrap.dedent(shown)
    test = CALLED_FROM + "from engine.work import Shown\n" + in_test(body)
    suite = Suite(checkout(tmp_path, code, test), [tmp_path / "python"])
    path = tmp_path / "test/registered/test_sample.py"
    suite.follow(path)
    [finding] = suite.findings
    assert path.read_text().splitlines()[finding.call_line - 1].strip() == line


def test_usage_errors(tmp_path, capsys):
    assert fixture_drift.main([str(tmp_path)]) == 2
    assert "has no python/ folder" in capsys.readouterr().err
    (tmp_path / "python").mkdir()
    assert fixture_drift.main([str(tmp_path)]) == 2
    assert "no test" in capsys.readouterr().err
    root = checkout(tmp_path, production("x.b"), CALL)
    assert fixture_drift.main([str(root), "test/registered/test_sample.py"]) == 1
    assert fixture_drift.main([str(root), "test/none.py"]) == 2
    (root / "README.md").write_text("SimpleNamespace\n")
    assert fixture_drift.main([str(root), "README.md"]) == 2
    assert "name a .py file" in capsys.readouterr().err
    (root / "test" / "registered" / "test_broken.py").write_text(
        "from types import SimpleNamespace\ndef (:\n"
    )
    capsys.readouterr()
    assert fixture_drift.main([str(root)]) == 2
    shown = capsys.readouterr()
    assert "lacks 'b'" in shown.out and "test_broken.py" in shown.err


def test_only_registered_tests(tmp_path):
    root = checkout(tmp_path, production("x.b"), CALL, register=False)
    assert found(root) == []
    test = root / "test" / "registered" / "test_sample.py"
    assert "register_" not in test.read_text()


def test_findings_are_repeatable_and_unique(tmp_path, capsys):
    body = "x.b\nx.b\nhelper(x)\nx.inner.d"
    root = checkout(
        tmp_path, production(body), CALL + CALL.replace("class T", "class U")
    )
    outputs = []
    for _ in range(2):
        assert fixture_drift.main([str(root)]) == 1
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    # Two stubs, each once for b and once for the nested d.
    assert outputs[0].startswith("test/") and outputs[0].count("lacks 'b'") == 2
    assert outputs[0].count("lacks 'd'") == 2


def test_a_long_test_ends(tmp_path):
    # Calls that fan out in every function would be followed for ever.
    layers = "\n".join(
        f"def f{i}(x):\n    f{i + 1}(x)\n    f{i + 1}(x)\n    f{i + 1}(x)"
        for i in range(14)
    )
    body = layers + "\ndef f14(x):\n    0\ndef work(x):\n    f0(x)\n"
    assert found(checkout(tmp_path, body, CALL)) == []
