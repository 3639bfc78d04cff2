"""No setting of the user's git, and nothing in the environment, reaches the series."""

import os

import pytest

HOSTILE = """
[user]
    name = H\u00f6stile
    email = h@example.org
    useConfigOnly = true
[commit]
    gpgSign = true
    template = /nonexistent/template
    cleanup = scissors
    verbose = true
[gpg]
    program = /bin/false
[tag]
    gpgSign = true
[core]
    autocrlf = true
    eol = crlf
    safecrlf = true
    fileMode = false
    hooksPath = {hooks}
    attributesFile = {attributes}
    excludesFile = {excludes}
    commentChar = W
    quotePath = true
    abbrev = 4
    pager = /bin/false
    editor = /bin/false
    whitespace = trailing-space,tab-in-indent
[apply]
    whitespace = error-all
    ignoreWhitespace = change
[am]
    threeWay = true
    keepcr = false
    messageid = true
[merge]
    ff = false
    verifySignatures = true
[pull]
    rebase = true
[rebase]
    autoSquash = true
[diff]
    noprefix = true
    mnemonicPrefix = true
    renames = copies
    algorithm = patience
    context = 7
    interHunkContext = 5
    external = /bin/false
    suppressBlankEmpty = true
    wordRegex = .
    submodule = log
    orderFile = /nonexistent/order
[format]
    signature = hostile
    numbered = true
    attach = true
    headers = "X-Hostile: yes\\n"
    thread = true
    coverLetter = true
    outputDirectory = /nonexistent
    pretty = oneline
    signOff = true
    subjectPrefix = HOSTILE
    suffix = .txt
    useAutoBase = true
    notes = true
    from = someone <x@example.org>
    filenameMaxLength = 12
[log]
    date = relative
    showSignature = true
    decorate = full
    follow = true
[status]
    short = true
    branch = true
    showUntrackedFiles = no
[color]
    ui = always
[init]
    defaultBranch = elsewhere
    templateDir = {template}
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[feature]
    manyFiles = true
[gc]
    auto = 1
[safe]
    directory = /nonexistent
[fetch]
    prune = true
[transfer]
    fsckObjects = true
[protocol]
    allow = never
[url "/nonexistent/"]
    insteadOf = /
"""


@pytest.fixture
def hostile(user, tmp_path, monkeypatch):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "commit-msg", "applypatch-msg", "pre-applypatch",
                 "post-checkout", "post-applypatch", "post-merge",
                 "reference-transaction", "prepare-commit-msg"):  # fmt: skip
        (hooks / name).write_text("#!/bin/sh\necho hook ran >&2\nexit 1\n")
        (hooks / name).chmod(0o755)
    template = tmp_path / "template"
    (template / "info").mkdir(parents=True)
    (template / "info/exclude").write_text("*.py\n")
    (template / "config").write_text("[core]\n\tautocrlf = true\n")
    attributes = tmp_path / "attributes"
    attributes.write_text("*.py text eol=crlf ident diff=hostile filter=hostile\n")
    excludes = tmp_path / "excludes"
    excludes.write_text("*.py\n*.sh\n")
    text = HOSTILE.format(
        hooks=hooks, template=template, attributes=attributes, excludes=excludes
    )
    (user / ".gitconfig").write_text(text)
    xdg = user / ".config/git"
    xdg.mkdir(parents=True)
    (xdg / "attributes").write_text("*.py text eol=crlf\n")
    (xdg / "ignore").write_text("*\n")
    (xdg / "config").write_text(text)
    for name, value in {
        "GIT_DIR": "/nonexistent/.git",
        "GIT_WORK_TREE": "/nonexistent",
        "GIT_INDEX_FILE": "/nonexistent/index",
        "GIT_OBJECT_DIRECTORY": "/nonexistent/objects",
        "GIT_AUTHOR_NAME": "Mallory",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z",
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.autocrlf",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_PARAMETERS": "'diff.noprefix=true'",
        "GIT_EXTERNAL_DIFF": "/bin/false",
        "GIT_DIFF_OPTS": "-u9",
        "GIT_TEMPLATE_DIR": str(template),
        "GIT_PREFIX": "nowhere/",
        "LC_ALL": "C.UTF-8",
        "TZ": "Pacific/Auckland",
    }.items():
        monkeypatch.setenv(name, value)


def quiet(world):
    """What a user with plain settings gets: patches, mirror, tip."""
    world.run("apply", "--discard")
    return world.snapshot(), world.git("rev-parse", "HEAD")


def test_apply_export_check_are_the_same(world, request, capsys, monkeypatch):
    files, tip = quiet(world)
    request.getfixturevalue("hostile")
    assert world.run("apply", "--discard") == 0
    assert (world.engine / ".git/refs/heads/series").read_text().strip() == tip
    assert world.run("check") == 0
    assert world.run("export") == 0
    assert world.run("status") == 0
    assert world.snapshot() == files
    dos = world.engine / "python/sglang/dos.py"
    assert dos.read_bytes() == b"A = 1\r\nB = 2\r\n"
    assert os.access(world.engine / "python/sglang/run.sh", os.X_OK)
    assert "hook ran" not in capsys.readouterr().err


def test_dirty_engine_is_still_seen(world, request):
    quiet(world)
    request.getfixturevalue("hostile")
    (world.engine / "python/sglang/new_file.py").write_text("A = 1\n")
    assert world.run("apply") == 1


def test_checkout_with_hostile_local_settings(world, tmp_path, request):
    folder = tmp_path / "mine"
    world.git("clone", "--quiet", str(world.engine), str(folder))
    world.git("checkout", "--quiet", "-B", "main", "base", folder=folder)
    for key, value in {
        "am.threeWay": "true",
        "commit.gpgsign": "true",
        "merge.ff": "false",
        "merge.verifySignatures": "true",
        "core.hooksPath": str(tmp_path / "hooks"),
        "apply.whitespace": "error-all",
    }.items():
        world.git("config", key, value, folder=folder)
    request.getfixturevalue("hostile")
    assert world.run("apply", "--checkout", str(folder)) == 0
    assert (folder / "python/sglang/other.py").read_text() == "VALUE = 2\n"
