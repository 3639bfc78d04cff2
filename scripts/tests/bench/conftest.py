"""Fixtures of the harness's tests."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchkit import STANDIN, git  # noqa: E402


@pytest.fixture
def standin(tmp_path):
    """A repository with a stand-in engine: a base commit and one patch above it."""
    engine = tmp_path / "engine"
    shutil.copytree(STANDIN, engine / "python" / "sglang")
    (engine / ".gitignore").write_text("*.so\n__pycache__/\n")
    (engine / "python" / "sglang" / "compiled.so").write_bytes(b"not in git")
    git(engine, "init", "-q")
    git(engine, "add", ".")
    git(engine, "commit", "-qm", "base")
    (engine / "python" / "sglang" / "patched.py").write_text("FASTER = True\n")
    git(engine, "add", ".")
    git(engine, "commit", "-qm", "kda: make it faster\n\nUpstream-Status: Pending")
    return engine
