"""The rules: each takes a Source and yields (line, rule, what to do).

They restate upstream's scripts/lint checks of the 0.5.23 tree for the files that
this series adds: registration, how a test is run, where it lies, and the state
and configuration reads that upstream holds at zero.
"""

import ast
import datetime
import re
from collections.abc import Iterator

from serieslib.registered_source import MARKER_REACH, TESTS, Source

KINDS = ("unit", "e2e", "accuracy", "perf", "stress", "kernels")

# The suites upstream's run_suite.py accepts (0.5.23 tree), by stage.
_BIG_NIGHTLY = "1-gpu-large 2-gpu-large 4-gpu-h100 4-gpu-b200 8-gpu-h200 8-gpu-b200"
CUDA_RUNNERS = {
    stage: runners.split()
    for stage, runners in {
        "base-a": "1-gpu-small",
        "base-b": "1-gpu-small 1-gpu-large 2-gpu-large 4-gpu-b200",
        "base-b-kernel-unit": "1-gpu-large 4-gpu-b200 8-gpu-h200",
        "base-b-kernel-benchmark": "1-gpu-large",
        "base-c": "4-gpu-h100 4-gpu-b200 4-gpu-gb300 8-gpu-h20 8-gpu-h200 8-gpu-b200"
        " 8-gpu-b300",
        "extra-a": "1-gpu-small 1-gpu-large 2-gpu-large",
        "extra-b": "4-gpu-h100 4-gpu-b200 8-gpu-h200",
        "nightly": _BIG_NIGHTLY + " 4-gpu-gb300",
        "weekly": _BIG_NIGHTLY,
    }.items()
}
CPU_SUITES = (
    "base-a-test-cpu",
    "stage-a-test-cpu-intel",
    "stage-a-tp-test-cpu-intel",
    "stage-b-test-cpu-intel",
    "base-b-test-cpu-arm64",
    "default",
    "weekly-test-cpu",
)
COST_LIMIT = 1200  # est_time (s) x devices of one default pull-request registration
_ISSUE = re.compile(r"#\d+|https?://\S+")
_UNTIL = re.compile(r"\buntil[ :=]+(\S+)", re.IGNORECASE)
_DEVICES = re.compile(r"(?:^|-)(\d+)-(?:gpu|npu)\b")


Found = Iterator[tuple[int, str, str]]

# Registration ---------------------------------------------------------------


def check_registry(src: Source) -> Found:
    for line, message in src.refused:
        yield line, "registry", f"the CI parser refuses this: {message}"
    counted = {registration.line for registration in src.registrations}
    counted |= {line for line, _ in src.refused}
    known = src.ci.REGISTER_MAPPING
    for call, name in src.calls():
        if name.rsplit(".", 1)[-1] in known and call.lineno not in counted:
            yield (
                call.lineno,
                "registry-form",
                "the CI parser does not see this: call it by its own name in a "
                "module-level statement",
            )
    if not src.registrations and not src.refused:
        yield (
            1,
            "registry",
            "add a module-level register_*_ci(...), or move the file out of " + TESTS,
        )


def check_suite(src: Source) -> Found:
    backends = src.ci.HWBackend
    for line, entry in src.registrations:
        if entry.nightly:
            yield line, "suite", 'use stage="nightly" instead of nightly=True'
        suite = entry.effective_suite
        if entry.backend is backends.CPU and suite not in CPU_SUITES:
            yield line, "suite", f"no CPU suite {suite!r}; use one of {CPU_SUITES}"
        elif entry.backend is backends.CUDA and entry.stage is None:
            if entry.suite.split("-")[0] != "stress":
                yield (
                    line,
                    "suite",
                    f"suite={entry.suite!r} is not dispatchable via /rerun-test: "
                    "give stage= and runner_config=",
                )
        elif entry.backend is backends.CUDA:
            yield from _check_cuda_pair(line, entry.stage, entry.runner_config)


def _check_cuda_pair(line: int, stage: str, runner: str) -> Found:
    if "-test-" in stage + runner:
        message = "leave '-test-' out: the suite name is built from the pair"
    elif stage not in CUDA_RUNNERS:
        message = f"no CUDA stage {stage!r}; use one of {sorted(CUDA_RUNNERS)}"
    elif runner not in CUDA_RUNNERS[stage]:
        message = f"no {runner!r} in {stage}; use one of {CUDA_RUNNERS[stage]}"
    else:
        return
    yield line, "suite", message


def check_cost(src: Source) -> Found:
    for line, entry in src.registrations:
        dispatch = entry.stage or entry.suite
        devices = _DEVICES.search(entry.runner_config or entry.suite)
        if entry.disabled is not None or devices is None:
            continue
        if not dispatch.startswith(("base-", "stage-")):
            continue
        cost = entry.est_time * int(devices.group(1))
        if cost > COST_LIMIT and not src.has_marker(line, "ci-cost-override:"):
            yield (
                line,
                "cost",
                f"{cost:g} device seconds of the default pull-request run are over "
                f"{COST_LIMIT}: lower est_time, register for extra or nightly, or "
                f"give the reason in a '# ci-cost-override: ...' comment within "
                f"{MARKER_REACH} lines above",
            )


def check_backend(src: Source) -> Found:
    backends = src.ci.HWBackend
    if backends.CUDA not in {entry.backend for _, entry in src.registrations}:
        return
    for line, entry in src.registrations:
        if entry.backend in (backends.CUDA, backends.CPU):
            continue
        if not src.has_marker(line, "backend-specific:"):
            yield (
                line,
                "backend",
                f"say what the {entry.backend.name} run finds that CUDA does not in "
                f"a '# backend-specific: ...' comment within {MARKER_REACH} lines above",
            )


def check_disabled(src: Source) -> Found:
    reasons = [
        (line, entry.disabled)
        for line, entry in src.registrations
        if entry.disabled is not None
    ]
    skips = ("unittest.skip", "pytest.mark.skip")
    called = set()
    for call, name in src.calls():
        called.add(call.func)
        if name in skips:
            given = [k.value for k in call.keywords if k.arg == "reason"] + call.args
            literal = given[0] if given else None
            text = literal.value if isinstance(literal, ast.Constant) else None
            reasons.append((call.lineno, text))
    for node in ast.walk(src.tree):
        if isinstance(node, ast.Attribute) and node not in called:
            if src.dotted(node) == "pytest.mark.skip":
                reasons.append((node.lineno, None))
    for line, reason in reasons:
        problem = _reason_problem(reason, src.today)
        if problem:
            yield line, "disabled", problem


def _reason_problem(reason: object, today: datetime.date) -> str | None:
    if not isinstance(reason, str):
        return "give the reason as a literal with an issue and 'until YYYY-MM-DD'"
    if not _ISSUE.search(reason):
        return "name the issue (#123 or its address) in the reason"
    until = _UNTIL.search(reason)
    if until is None:
        return "say 'until YYYY-MM-DD' in the reason"
    try:
        deadline = datetime.date.fromisoformat(until.group(1).rstrip(".,;)"))
    except ValueError:
        return f"{until.group(1)!r} is no date: say 'until YYYY-MM-DD'"
    if deadline < today:
        return f"expired on {deadline}: enable the test again or move the date"
    return None


# How the file is run ----------------------------------------------------------


def _is_main_guard(stmt: ast.stmt) -> bool:
    if not isinstance(stmt, ast.If):
        return False
    return ast.unparse(stmt.test) in (
        "__name__ == '__main__'",
        "'__main__' == __name__",
    )


def _test_shapes(src: Source) -> tuple[bool, bool]:
    """(has unittest classes, has tests that only pytest collects)."""
    cases, plain = set(), False
    for stmt in src.tree.body:
        if isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef)):
            plain = plain or stmt.name.startswith("test")
        elif isinstance(stmt, ast.ClassDef):
            bases = [ast.unparse(base) for base in stmt.bases]
            if any("TestCase" in base or base in cases for base in bases):
                cases.add(stmt.name)
            elif stmt.name.startswith("Test") and not bases:
                plain = True
    return bool(cases), plain


def check_main(src: Source) -> Found:
    enabled = any(entry.disabled is None for _, entry in src.registrations)
    if enabled and not src.has_main:
        yield 1, "main", 'add `if __name__ == "__main__":` that runs the tests'
        return
    guards = [stmt for stmt in src.tree.body if _is_main_guard(stmt)]
    calls = [pair for guard in guards for pair in src.calls(guard)]
    has_cases, has_plain = _test_shapes(src)
    by_pytest = any(name == "pytest.main" for _, name in calls) or any(
        name.rsplit(".", 1)[-1] == "multigpu_pytest_main" for _, name in src.calls()
    )
    by_unittest = any(name == "unittest.main" for _, name in calls)
    line = guards[0].lineno if guards else 1
    if has_plain and not by_pytest:
        yield (
            line,
            "main-runner",
            "pytest-style tests here are never run: end with "
            'sys.exit(pytest.main([__file__, "-v"]))',
        )
    elif has_cases and not (by_pytest or by_unittest):
        yield (
            line,
            "main-runner",
            "call unittest.main() in the __main__ block: CI runs `python3 FILE -f`",
        )
    for guard in guards:
        yield from _check_pytest_main(src, guard)


def _check_pytest_main(src: Source, guard: ast.If) -> Found:
    exits = [call for call, name in src.calls(guard) if name == "sys.exit"]
    for node in ast.walk(guard):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            if src.dotted(node.exc.func) == "SystemExit":
                exits.append(node.exc)
    passed_on = {sub for call in exits for sub in ast.walk(call)}
    exit_names = {sub.id for sub in passed_on if isinstance(sub, ast.Name)}
    stored = {
        node.value
        for node in ast.walk(guard)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id in exit_names for t in node.targets)
    }
    for call, name in src.calls(guard):
        if name != "pytest.main":
            continue
        if call not in passed_on and call not in stored:
            yield (
                call.lineno,
                "main-exit",
                "wrap it in sys.exit(...): a failing test would leave exit status 0",
            )
        argv = any(src.dotted(n) == "sys.argv" for n in ast.walk(call))
        if argv or not (call.args or call.keywords):
            yield (
                call.lineno,
                "main-argv",
                "name the arguments, [__file__, ...]: CI adds -f, which pytest refuses",
            )


# Where the file lies ------------------------------------------------------------


def check_layout(src: Source) -> Found:
    parts = src.rel.split("/")[2:]
    if parts[0] == "kernels":
        if len(parts) < 4 or parts[1] not in ("ops", "benchmark"):
            yield (
                1,
                "layout",
                f"move it to {TESTS}/kernels/ops/<group>/ or kernels/benchmark/<group>/",
            )
    elif parts[0] not in KINDS or len(parts) < 3:
        yield 1, "layout", f"move it to {TESTS}/<kind>/<subsystem>/, kind in {KINDS}"
    for line, entry in src.registrations:
        if entry.stage == "base-b-kernel-benchmark" and parts[:2] != [
            "kernels",
            "benchmark",
        ]:
            yield line, "layout", f"benchmarks lie under {TESTS}/kernels/benchmark/"


def check_unit_server(src: Source) -> Found:
    if not src.rel.startswith(f"{TESTS}/unit/"):
        return
    for node in ast.walk(src.tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            if "popen_launch" in src.dotted(node).rsplit(".", 1)[-1]:
                yield node.lineno, "unit-server", f"move the test to {TESTS}/e2e/"


# What every file must not do -----------------------------------------------------


def check_package(src: Source) -> Found:
    known = src.ci.REGISTER_MAPPING
    for call, name in src.calls():
        if name.rsplit(".", 1)[-1] in known:
            yield call.lineno, "package", f"move the registered test to {TESTS}/"


def check_shadowed(src: Source) -> Found:
    scopes = [src.tree] + [n for n in ast.walk(src.tree) if isinstance(n, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for scope in scopes:
        first: dict[str, int] = {}
        for node in scope.body:
            if not isinstance(node, kinds) or _rebinds_on_purpose(node):
                continue
            if node.name in first:
                yield (
                    first[node.name],
                    "shadowed",
                    f"{node.name} is defined again on line {node.lineno} and only that "
                    "one runs: rename one",
                )
            first[node.name] = node.lineno


def _rebinds_on_purpose(node: ast.AST) -> bool:
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = ast.unparse(target).rsplit(".", 1)[-1]
        if last == "overload":
            return True
        if isinstance(target, ast.Attribute):
            if last in ("setter", "getter", "deleter", "register"):
                return True
    return False


def _is_server_args_call(src: Source, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return src.dotted(node.func).rsplit(".", 1)[-1] == "get_server_args"


def _global_aliases(src: Source) -> set[str]:
    """Names that hold the published record: ``sa = get_server_args()``."""
    targets = []
    for node in ast.walk(src.tree):
        if isinstance(node, ast.Assign) and _is_server_args_call(src, node.value):
            targets += node.targets
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None and _is_server_args_call(src, node.value):
                targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def check_server_args(src: Source) -> Found:
    read = "read it through a sglang.srt.runtime_context accessor (get_exec(), ...)"
    write = "use get_context().override(...), or override_server_args(...) in tests"
    aliases = _global_aliases(src)

    def is_global(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in aliases
        return _is_server_args_call(src, node)

    def is_record(node: ast.AST) -> bool:
        named = ast.unparse(node).rsplit(".", 1)[-1] == "server_args"
        return named or is_global(node)

    for node in ast.walk(src.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "get_server_args" and alias.asname:
                    yield node.lineno, "server-args-read", "import it by its own name"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Load) and is_global(node.value):
                yield node.lineno, "server-args-read", read
            elif not isinstance(node.ctx, ast.Load) and is_record(node.value):
                yield node.lineno, "server-args-write", write
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            dynamic = src.dotted(node.func)
            if dynamic in ("getattr", "hasattr") and is_global(node.args[0]):
                yield node.lineno, "server-args-read", read
            elif dynamic in ("setattr", "delattr") and is_record(node.args[0]):
                yield node.lineno, "server-args-write", write


def check_global(src: Source) -> Found:
    for node in ast.walk(src.tree):
        if isinstance(node, ast.Global):
            yield (
                node.lineno,
                "global",
                "keep the state in an object, not a module global",
            )


TEST_CHECKS = (
    check_registry,
    check_suite,
    check_cost,
    check_backend,
    check_disabled,
    check_main,
    check_layout,
    check_unit_server,
)
PACKAGE_CHECKS = (check_package, check_global)
COMMON_CHECKS = (check_shadowed, check_server_args)
