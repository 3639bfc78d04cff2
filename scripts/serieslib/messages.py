"""Which commit messages survive git am and carry what a reviewer needs."""

import re

from serieslib.am import Commit

_TRAILER = re.compile(
    r"Upstream-Status: (Pending|Submitted \[[^\]]+\]|Backport \[[^\]]+\]"
    r"|Inappropriate \[[^\]]+\])"
)
_SUBJECT = re.compile(r"[^\s\[\]:][^\[\]:]*: \S.*")
_TRAILER_FIX = (
    "end the message with a paragraph of one line `Upstream-Status: Pending` (or "
    "Submitted [url], Backport [url], Inappropriate [why])"
)


def message_problem(commit: Commit) -> tuple[str, str] | None:
    """What is wrong with a message and how to mend it, or None."""
    subject, lines = commit.subject, commit.body.splitlines()
    if subject.lstrip().startswith("["):
        return (
            "the subject starts with a bracket tag, which git am strips",
            "write it as `area: imperative summary`",
        )
    if not _SUBJECT.fullmatch(subject):
        return (
            "the subject is not `area: summary`",
            "write it as `area: imperative summary`",
        )
    for line in lines:
        if re.match(r"---(\s|$)", line):
            return (
                "a line of three dashes in the message: git am drops what follows it",
                "remove or reword that line",
            )
        if re.match(r"diff -|Index: ", line):
            return (
                f"the line {line!r} reads as the start of a diff to git am",
                "indent or reword that line",
            )
    found = [line for line in lines if line.lower().startswith("upstream-status:")]
    last = commit.body.split("\n\n")[-1].strip("\n")
    if len(found) != 1 or not _TRAILER.fullmatch(last):
        what = (
            "is missing" if not found else "is not the last paragraph, once and alone"
        )
        return f"the Upstream-Status trailer {what}", _TRAILER_FIX
    return None
