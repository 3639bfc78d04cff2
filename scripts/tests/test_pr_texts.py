"""Each rule of the pull-request text checker, with a text that breaks it."""

import subprocess
import sys
from pathlib import Path

import pytest
from serieslib import pr_texts
from serieslib.pr_texts import check_pr_texts, main

SCRIPT = Path(pr_texts.__file__)
TEST = "test/registered/kernels/ops/mamba/test_sample_op.py"
TEST_BODY = """\
import sys

import pytest

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=9, stage="base-b-kernel-unit", runner_config="1-gpu-large")


class TestSample:
    def test_bits(self):
        assert True


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
"""
PATCH = f"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: Someone <someone@example.org>
Date: Fri, 30 Oct 2026 00:00:00 +0000
Subject: [PATCH] kda: store q, k and v as planes that the prefill kernels can
 read

The copies cost 1,356 us a layer. The planar store is 1.24x faster on one
H200; not measured on Blackwell.

Upstream-Status: Pending
---
 {TEST} | 16 ++++++++++++++++
 1 file changed, 16 insertions(+)

diff --git a/{TEST} b/{TEST}
new file mode 100644
index 0000000..1111111
--- /dev/null
+++ b/{TEST}
@@ -0,0 +1 @@
+import sys
"""
TEXT = f"""\
# [KDA] Store q, k and v as planes that the prefill kernels can read

## Motivation

Copies cost 1356 us a layer at 4 x 16,384 tokens (8xB300 serves `9 s` chunks).

## Modifications

One store of three planes.

## Accuracy Tests

Bitwise equal on one H200. Not measured on Blackwell.

## Speed Tests and Profiling

From docs/conv.md, one H200: 1.24x, and by shape

| T | us | ratio |
|---|---|---|
| 16384 | 645 | 1.24x |

Serving was not
measured.

## Checklist

- [x] Unit tests.

/rerun-test {TEST}::TestSample.test_bits
"""
TABLE = "| T | us | ratio |\n|---|---|---|\n| 16384 | 645 | 1.24x |\n"


@pytest.fixture
def project(tmp_path):
    files = {
        "patches/0002-kda-planes.patch": PATCH,
        "docs/pull-requests/0002.md": TEXT,
        "docs/conv.md": TABLE,
        TEST: TEST_BODY,
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return tmp_path


def edit(project, name, old, new):
    path = project / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def rules(project):
    return [finding.split(": ")[1] for finding in check_pr_texts(project)]


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def test_an_agreeing_text_has_no_finding(project):
    assert check_pr_texts(project) == []


BROKEN = {
    "another summary": ("Store q, k and v", "Store q and k", "title"),
    "another area": ("# [KDA]", "# [MoE]", "title"),
    "no bracketed area": ("# [KDA] Store", "# kda: store", "title"),
    "no capital in the area": ("# [KDA]", "# [kda]", "title"),
    "no capital in the summary": ("[KDA] Store", "[KDA] store", "title"),
    "no title": ("# [KDA]", "[KDA]", "title"),
    "a section is missing": ("## Modifications", "### Modifications", "headings"),
    "a section is empty": ("One store of three planes.\n", "\n", "headings"),
    "a heading inside a fence": (
        "## Modifications\n",
        "```\n## Modifications\n```\n",
        "headings",
    ),
    "a checklist without items": ("- [x] Unit", "Unit", "headings"),
    "an accuracy section that claims all": (
        "Not measured on Blackwell.",
        "Nothing ran on Blackwell.",
        "not-measured",
    ),
    "a speed section that claims all": ("not\nmeasured", "good", "not-measured"),
    "a speed section that only says measured": (
        "was not\nmeasured",
        "was measured",
        "not-measured",
    ),
    "a gap left open": ("three planes.", "three planes (TODO).", "placeholder"),
    "a number in words": ("cost 1356 us", "cost 1356 us, or 1357 us", "numbers"),
    "a ratio": ("H200: 1.24x", "H200: 1.42x", "numbers"),
    "a percentage": ("three planes.", "three planes, 24% faster.", "numbers"),
    "a number at the end of a range": ("1.24x, and", "1.24x-1.31x, and", "numbers"),
    "a table cell": ("| 645 |", "| 654 |", "numbers"),
    "a table row's columns": ("| 645 | 1.24x |", "| 1.24x | 645 |", "numbers"),
    "a table row's label": ("| 16384 | 645", "| 1356 | 645", "numbers"),
    "one exception more": ("on Blackwell.", "on Blackwell or XPU.", "devices"),
    "another exception": (
        "Not measured on Blackwell.",
        "Accuracy was measured on B300; XPU was not measured.",
        "devices",
    ),
    "an exception that a claim undoes": (
        "three planes.",
        "three planes, measured on GB300.",
        "devices",
    ),
    "a docs file that is not there": ("docs/conv.md", "docs/gone.md", "numbers"),
    "the selector's class": ("::TestSample", "::TestOther", "rerun"),
    "the selector's method": (".test_bits", ".test_bit", "rerun"),
    "another file": (f"/rerun-test {TEST}", "/rerun-test test/x.py", "rerun"),
    "no /rerun-test": ("/rerun-test", "rerun", "rerun"),
}


@pytest.mark.parametrize(("old", "new", "rule"), BROKEN.values(), ids=BROKEN)
def test_broken_text(project, old, new, rule):
    edit(project, "docs/pull-requests/0002.md", old, new)
    assert set(rules(project)) == {rule}


BROKEN_MESSAGE = {
    "a number": ("1.24x faster", "1.42x faster", "message"),
    "a number without a unit": ("1.24x faster", "1.24x (645) and 511 here", "message"),
    "no exception": ("; not measured on Blackwell", "", "devices"),
    "a claim": ("not measured on Blackwell", "measured on Blackwell", "devices"),
    "another device": ("on Blackwell", "on AMD", "devices"),
}


@pytest.mark.parametrize(
    ("old", "new", "rule"), BROKEN_MESSAGE.values(), ids=BROKEN_MESSAGE
)
def test_broken_message(project, old, new, rule):
    edit(project, "patches/0002-kda-planes.patch", old, new)
    assert set(rules(project)) == {rule}


def test_before_and_after_in_the_message_are_one_row_in_order(project):
    patch = "patches/0002-kda-planes.patch"
    for name in ("docs/conv.md", "docs/pull-requests/0002.md"):
        edit(project, name, "| 16384 | 645", "| 16384 | 1356 | 645")
    edit(project, patch, "a layer.", "a layer:\n1356 us ->\n645 us.")
    assert rules(project) == []
    edit(project, patch, "1356 us ->\n645 us", "645 ->\n1356 us")
    (found,) = check_pr_texts(project)
    assert "message: 645 -> 1356 of the commit message is not in" in found


def test_other_words_for_the_same_exception(project):
    """A device by another name, wrapped, and a box that is not ticked yet."""
    path = "docs/pull-requests/0002.md"
    edit(project, path, "Not measured on Blackwell.", "It was not measured: no\nB300.")
    edit(project, path, "- [x] Unit tests.", "- [x] Unit tests.\n- [ ] Run on SM100.")
    assert check_pr_texts(project) == []
    edit(project, path, "- [ ] Run on", "- [x] Run on")
    assert rules(project) == ["devices"]


def test_a_finding_names_line_number_and_sources(project):
    edit(project, "docs/pull-requests/0002.md", "| 645 |", "| 654 |")
    (found,) = check_pr_texts(project)
    line = line_of(TEXT, "| 645 |")
    assert found == (
        f"docs/pull-requests/0002.md:{line}: numbers: 654 is not in the commit "
        "message or docs/conv.md: correct it or cite"
    )


def test_a_docs_file_counts_only_when_it_is_cited(project):
    edit(project, "docs/pull-requests/0002.md", "From docs/conv.md, one", "One")
    assert rules(project) == ["numbers"]  # 645 is in the docs file alone


def test_another_text_is_no_source(project):
    """Texts must not prove each other."""
    (project / "docs/pull-requests/0001.md").write_text("999 us")
    edit(
        project,
        "docs/pull-requests/0002.md",
        "three planes.",
        "planes: 999 us (docs/pull-requests/0001.md).",
    )
    assert "numbers" in rules(project)


def test_sections_in_another_order(project):
    path = project / "docs/pull-requests/0002.md"
    head, tail = TEXT.split("## Modifications")
    body, rest = tail.split("## Accuracy Tests")
    motivation = head[head.index("## Motivation") :]
    path.write_text(
        head.replace(motivation, "")
        + "## Modifications"
        + body
        + motivation
        + "## Accuracy Tests"
        + rest
    )
    assert rules(project) == ["headings"]


def test_a_new_test_must_be_named(project):
    other = TEST.replace("sample", "second")
    (project / other).write_text(TEST_BODY)
    edit(
        project,
        "patches/0002-kda-planes.patch",
        "+import sys",
        f"+import sys\n--- /dev/null\n+++ b/{other}\n@@ -0,0 +1 @@\n+x",
    )
    (found,) = check_pr_texts(project)
    assert f"rerun: name {other} too" in found


def test_a_gap_in_the_commit_message(project):
    edit(project, "patches/0002-kda-planes.patch", "1.24x faster", "@@RATIO@@ faster")
    (found,) = check_pr_texts(project)
    assert "placeholder: @@RATIO@@ in the message of 0002-kda-planes.patch" in found


def test_a_named_test_must_be_registered_and_parse(project):
    edit(project, TEST, "register_cuda_ci(", "print(")
    (found,) = check_pr_texts(project)
    assert f"{TEST} is not registered" in found
    (project / TEST).write_text("def (:\n")
    assert "does not parse" in check_pr_texts(project)[0]
    (project / TEST).unlink()
    assert "is missing from the tree" in check_pr_texts(project)[0]


def test_a_test_of_another_patch_is_refused(project):
    edit(project, "patches/0002-kda-planes.patch", f"+++ b/{TEST}", "+++ b/a.py")
    (found,) = check_pr_texts(project)
    assert f"{TEST} is not in 0002-kda-planes.patch" in found


def test_a_patch_without_tests_says_so(project):
    edit(project, "patches/0002-kda-planes.patch", f"+++ b/{TEST}", "+++ b/a.py")
    path = "docs/pull-requests/0002.md"
    edit(project, path, f"/rerun-test {TEST}::TestSample.test_bits\n", "")
    assert rules(project) == ["rerun"]
    edit(project, path, "One store", "It has no registered test. One store")
    assert rules(project) == []


def test_each_patch_has_its_text_and_each_text_its_patch(project):
    (project / "docs/pull-requests/0002.md").rename(
        project / "docs/pull-requests/0003.md"
    )
    missing, orphan = check_pr_texts(project)
    assert missing.startswith("docs/pull-requests/0002.md:1: missing: ")
    assert orphan.startswith("docs/pull-requests/0003.md:1: orphan: ")


def test_command(project, capsys):
    def run():
        command = [sys.executable, str(SCRIPT), "--root", str(project)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (run().returncode, run().stdout) == (0, "")
    edit(project, "docs/pull-requests/0002.md", "cost 1356 us", "cost 1357 us")
    done = run()
    assert done.returncode == 1 and ": numbers: 1357 us is not in" in done.stdout
    assert main(["--root", str(project / "docs")]) == 2
    assert "has no patches/" in capsys.readouterr().err
